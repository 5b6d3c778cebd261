-- A catalog as Weft of schema 3 left it (sqlite3's .dump): tests that it is taken over.
PRAGMA application_id=1464157780;
PRAGMA user_version=3;
BEGIN TRANSACTION;
CREATE TABLE meta (
  generation INTEGER NOT NULL, epoch INTEGER NOT NULL,
  fingerprint TEXT NOT NULL, architecture TEXT NOT NULL
);
INSERT INTO "meta" VALUES(1,9,'f00d','TinyForCausalLM');
CREATE TABLE pins (
  policy TEXT NOT NULL, version INTEGER NOT NULL, PRIMARY KEY (policy, version)
);
INSERT INTO "pins" VALUES('math',2);
CREATE TABLE policies (
  name TEXT PRIMARY KEY, kind INTEGER NOT NULL, last_version INTEGER NOT NULL,
  fencing_token INTEGER NOT NULL, served_version INTEGER NOT NULL
, retain INTEGER NOT NULL DEFAULT 0);
INSERT INTO "policies" VALUES('base',1,2,4,2,0);
INSERT INTO "policies" VALUES('math',2,4,7,3,2);
CREATE TABLE versions (
  policy TEXT NOT NULL, version INTEGER NOT NULL, state INTEGER NOT NULL,
  trainer_id TEXT NOT NULL, request_id TEXT NOT NULL, transfer_id TEXT NOT NULL,
  layout_digest BLOB NOT NULL, create_time REAL NOT NULL, commit_time REAL NOT NULL,
  digest_algorithm INTEGER, digest_value BLOB, digest_size_bytes INTEGER,
  adapter_config TEXT, adapter_config_digest BLOB, adapter_base TEXT, adapter_trained_on INTEGER,
  failure_reason TEXT, failure_message TEXT,
  PRIMARY KEY (policy, version)
);
INSERT INTO "versions" VALUES('base',1,4,'t1','q-base-1','t-base-1',X'6C61796F75742D62617365',1763700001.25,1763700002.5,1,X'00FF20646967657374',256,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "versions" VALUES('base',2,2,'t1','q-base-2','t-base-2',X'6C61796F75742D62617365',1763700002.25,1763700003.5,1,X'00FF20646967657374',256,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "versions" VALUES('math',1,4,'t1','q-math-1','t-math-1',X'6C61796F75742D6D617468',1763700001.25,1763700002.5,1,X'00FF20646967657374',256,'{"peft_type": "LORA", "r": 8, "lora_alpha": 16}',X'000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1E1F','f00d',1,NULL,NULL);
INSERT INTO "versions" VALUES('math',2,2,'t1','q-math-2','t-math-2',X'6C61796F75742D6D617468',1763700002.25,1763700003.5,1,X'00FF20646967657374',256,'{"peft_type": "LORA", "r": 8, "lora_alpha": 16}',X'000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1E1F','f00d',1,NULL,NULL);
INSERT INTO "versions" VALUES('math',3,2,'t1','q-math-3','t-math-3',X'6C61796F75742D6D617468',1763700003.25,1763700004.5,1,X'00FF20646967657374',256,'{"peft_type": "LORA", "r": 8, "lora_alpha": 16}',X'000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1E1F','f00d',1,NULL,NULL);
INSERT INTO "versions" VALUES('math',4,3,'t1','q-math-4','t-math-4',X'6C61796F75742D6D617468',1763700004.25,0.0,NULL,NULL,NULL,'{"peft_type": "LORA", "r": 8, "lora_alpha": 16}',X'000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1E1F','f00d',1,'DEADLINE','späť: the push''s time was up');
CREATE TABLE withdrawn (
  replica_id TEXT PRIMARY KEY, standing INTEGER NOT NULL, reason TEXT NOT NULL
);
INSERT INTO "withdrawn" VALUES('replica-1',6,'new disk');
CREATE UNIQUE INDEX versions_by_request ON versions (trainer_id, request_id);
CREATE UNIQUE INDEX versions_by_transfer ON versions (transfer_id);
CREATE INDEX versions_by_state ON versions (state);
COMMIT;
