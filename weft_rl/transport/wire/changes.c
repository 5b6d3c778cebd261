// Coding of changed elements on a host's processor: the same payloads as changes.py makes, which is
// the specification, some twenty times as fast. Compiled where it runs; see host_changes.py.
//
// Source: docs/protocol.md, A bucket of changes.

#include <stdint.h>
#include <string.h>

#define BLOCK 16384
#define RAW 0xFFFF
#define LITERAL 7
#define MAX_STEP 8
#define WIDTH 4096

typedef struct {
  int64_t at;       // first byte of its elements in the memory that is read or written
  int64_t new_at;   // address of its new elements, to be compared
  int64_t num;      // elements
  int64_t size;     // bytes of an element
  int64_t first;    // first element in its tensor
  int64_t row;      // elements of a row in the tensor
  int64_t stride;   // elements between the beginnings of two rows there; 0 for one row
  int64_t place_row;     // the same in the memory
  int64_t place_stride;
} Run;

// What is wrong with a payload; see host_changes.py.
enum {
  FINE, TOO_SHORT, NUMBERS, LENGTH, BLOCK_LENGTH, NO_END, OUTSIDE, NO_STEP, GIVEN, TWICE, NOT_ZERO
};

// Inlined where `size` is a constant: reading and writing an element is one instruction then.
#define INLINED static inline __attribute__((always_inline))

INLINED uint64_t load(const uint8_t *at, int size) {
  uint64_t bits = 0;
  memcpy(&bits, at, size);
  return bits;
}

INLINED uint64_t mask(int size) { return ~(uint64_t)0 >> (64 - 8 * size); }

INLINED int64_t elements_to(int64_t index, int64_t row, int64_t stride) {
  return stride ? index / row * stride + index % row : index;
}

// Weights of a digest's words, with that of the row that was asked for last.
typedef struct {
  const uint64_t *columns;
  uint64_t row, of_row;
} Weights;

static Weights weights_of(const uint64_t *columns) { return (Weights){columns, ~(uint64_t)0, 0}; }

INLINED uint64_t weight(Weights *weights, uint64_t word) {
  if (word / WIDTH != weights->row) {
    weights->row = word / WIDTH;
    uint64_t z = (weights->row + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    weights->of_row = (z ^ z >> 31) << 1;
  }
  return weights->of_row + weights->columns[word % WIDTH];
}

INLINED uint64_t weighed(const Run *run, int64_t index, Weights *weights, int size) {
  uint64_t byte = (run->first + elements_to(index, run->row, run->stride)) * size;
  return weight(weights, byte >> 3) << (8 * (byte & 7));
}

// Bits of a gap's remainder: the first k for which 2**k is more than half of the mean distance, less
// a quarter.
static int rice_bits(int64_t count, int64_t num) {
  if (!count) return 0;
  int64_t half = (2 * num - count) / (4 * count);
  int k = 0;
  while (k < 14 && half >> k) k++;
  return k;
}

// -- writing -----------------------------------------------------------------------

typedef struct {
  uint8_t *at;
  uint64_t bits;
  int num;
} Writer;

// Write up to 24 bits.
INLINED void put(Writer *out, uint64_t value, int num) {
  out->bits |= value << out->num;
  out->num += num;
  if (out->num >= 32) {
    memcpy(out->at, &out->bits, 4);
    out->at += 4;
    out->bits >>= 32;
    out->num -= 32;
  }
}

INLINED void put_unary(Writer *out, int64_t quotient) {
  for (; quotient >= 24; quotient -= 24) put(out, 0, 24);
  put(out, (uint64_t)1 << quotient, (int)quotient + 1);
}

static void flush(Writer *out) {
  for (; out->num > 0; out->num -= 8, out->bits >>= 8) *out->at++ = (uint8_t)out->bits;
}

typedef struct {
  uint16_t at[BLOCK];
  uint8_t code[BLOCK];  // of a step of one: whether it is down
  uint64_t given[BLOCK];
  int64_t num, num_given;
} List;

static int64_t unary_bits(const List *list, int k) {
  int64_t bits = list->num, before = -1;
  for (int64_t i = 0; i < list->num; i++) {
    bits += (list->at[i] - before - 1) >> k;
    before = list->at[i];
  }
  return bits;
}

static void put_remainders(Writer *out, const List *list, int k) {
  int64_t before = -1;
  for (int64_t i = 0; k && i < list->num; i++) {
    put(out, (list->at[i] - before - 1) & (((int64_t)1 << k) - 1), k);
    before = list->at[i];
  }
}

static void put_quotients(Writer *out, const List *list, int k) {
  int64_t before = -1;
  for (int64_t i = 0; i < list->num; i++) {
    put_unary(out, (list->at[i] - before - 1) >> k);
    before = list->at[i];
  }
}

typedef struct {
  const Run *run;
  Weights weights;
  uint64_t sum, old_sum, listed;
  int64_t num_changes;
  List near, far;
} Coder;

INLINED void note(Coder *coder, int64_t begin, int64_t in, uint64_t old, uint64_t new, int size) {
  int shift = 64 - 8 * size;
  int64_t step = (int64_t)((new - old) << shift) >> shift;
  uint64_t own = weighed(coder->run, begin + in, &coder->weights, size);
  coder->sum += own * (new - old);
  coder->listed += own * old;
  coder->num_changes++;
  if (step == 1 || step == -1) {
    List *near = &coder->near;
    near->at[near->num] = (uint16_t)in;
    near->code[near->num++] = step < 0;
    return;
  }
  List *far = &coder->far;
  far->at[far->num] = (uint16_t)in;
  if (step >= -MAX_STEP && step <= MAX_STEP) {
    far->code[far->num++] = (uint8_t)(step > 0 ? step - 2 : 6 - step);
  } else {
    far->code[far->num++] = LITERAL;
    far->given[far->num_given++] = new;
  }
}

// Note what differs in two words, the first of whose elements is at `in` in its block.
INLINED void compare_words(Coder *coder, uint64_t old, uint64_t new, int64_t begin, int64_t in, int size) {
  for (uint64_t differ = old ^ new; differ;) {
    int bit = __builtin_ctzll(differ) / (8 * size) * (8 * size);
    note(coder, begin, in + bit / (8 * size), old >> bit & mask(size), new >> bit & mask(size), size);
    differ &= ~(mask(size) << bit);
  }
}

INLINED void compare(Coder *coder, const uint8_t *old, const uint8_t *new, int64_t begin, int64_t num, int size) {
  int64_t per_word = 8 / size, per_piece = 8 * per_word, in = 0;
  for (; in + per_piece <= num; in += per_piece) {
    uint64_t one[8], other[8], differ = 0;
    memcpy(one, old + in * size, 64);
    memcpy(other, new + in * size, 64);
    for (int i = 0; i < 8; i++) differ |= one[i] ^ other[i];
    for (int i = 0; differ && i < 8; i++)
      compare_words(coder, one[i], other[i], begin, in + i * per_word, size);
  }
  for (; in < num; in++)
    compare_words(coder, load(old + in * size, size), load(new + in * size, size), begin, in, size);
}

static uint64_t header(uint64_t near, uint64_t far, uint64_t given, uint64_t words) {
  return near | far << 16 | given << 32 | words << 48;
}

// Code a block; return the end of its body.
static uint8_t *encode_block(Coder *coder, const uint8_t *old, const uint8_t *new, int64_t begin,
                             int64_t num, uint64_t *head, uint8_t *body) {
  List *near = &coder->near, *far = &coder->far;
  const Run *run = coder->run;
  near->num = far->num = far->num_given = 0;
  coder->listed = 0;
  switch (run->size) {
    case 1: compare(coder, old, new, begin, num, 1); break;
    case 2: compare(coder, old, new, begin, num, 2); break;
    case 4: compare(coder, old, new, begin, num, 4); break;
    default: compare(coder, old, new, begin, num, 8);
  }
  if (!near->num && !far->num) {
    *head = 0;
    return body;
  }
  int near_bits = rice_bits(near->num, num), far_bits = rice_bits(far->num, num);
  int64_t bits = near->num * (near_bits + 1) + far->num * (far_bits + 4) +
                 unary_bits(near, near_bits) + unary_bits(far, far_bits);
  int64_t words = ((bits + 7) / 8 + far->num_given * run->size + 3) / 4;
  int64_t raw_words = (num * run->size + 3) / 4;
  memset(body, 0, 4 * (words < raw_words ? words : raw_words));
  if (words >= raw_words) {
    memcpy(body, new, num * run->size);
    *head = header(RAW, 0, 0, raw_words);
    for (int64_t in = 0; in < num; in++)
      coder->old_sum += weighed(run, begin + in, &coder->weights, (int)run->size) *
                        load(old + in * run->size, (int)run->size);
    return body + 4 * raw_words;
  }
  coder->old_sum += coder->listed;
  *head = header(near->num, far->num, far->num_given, words);
  Writer out = {body, 0, 0};
  put_remainders(&out, near, near_bits);
  for (int64_t i = 0; i < near->num; i++) put(&out, near->code[i], 1);
  put_remainders(&out, far, far_bits);
  for (int64_t i = 0; i < far->num; i++) put(&out, far->code[i], 4);
  put_quotients(&out, near, near_bits);
  put_quotients(&out, far, far_bits);
  flush(&out);
  for (int64_t i = 0; i < far->num_given; i++, out.at += run->size)
    memcpy(out.at, &far->given[i], run->size);
  return body + 4 * words;
}

// A block of runs that are cut one behind the other.
typedef struct {
  int64_t run, begin, num;  // its first element in its run, and how many it has
} Block;

// Go on to the next block, from {0, 0, 0}; return whether there is one.
static int next_block(Block *block, const Run *runs, int64_t num_runs) {
  block->begin += block->num;
  for (; block->run < num_runs && block->begin == runs[block->run].num; block->run++) block->begin = 0;
  if (block->run == num_runs) return 0;
  int64_t left = runs[block->run].num - block->begin;
  block->num = left < BLOCK ? left : BLOCK;
  return 1;
}

// Write the new elements of a block that was coded over the old ones.
static void overwrite(const Coder *coder, uint8_t *old, const uint8_t *new, int64_t num, uint64_t head) {
  const List *lists[] = {&coder->near, &coder->far};
  int64_t size = coder->run->size;
  if ((head & 0xFFFF) == RAW) memcpy(old, new, num * size);
  else for (int i = 0; i < 2; i++)
    for (int64_t nth = 0; nth < lists[i]->num; nth++) {
      int64_t at = lists[i]->at[nth] * size;
      memcpy(old + at, new + at, size);
    }
}

// Code some blocks of a payload of runs and what they are now, and write that over them if `overwrites`. Writes headers
// and bodies, and adds to the sums of each run; returns the bytes of the bodies, for all of which there is room.
int64_t weft_encode(uint8_t *old, int overwrites, const Run *runs, int64_t num_runs, const uint64_t *columns,
                    int64_t first_block, int64_t end_block, uint64_t *heads, uint8_t *bodies,
                    uint64_t *old_sums, uint64_t *sums, int64_t *num_changes, void *scratch) {
  Coder *coder = scratch;
  uint8_t *body = bodies;
  Block block = {0, 0, 0};
  coder->weights = weights_of(columns);
  coder->num_changes = 0;
  for (int64_t nth = 0; nth < end_block && next_block(&block, runs, num_runs); nth++) {
    if (nth < first_block) continue;
    const Run *run = coder->run = &runs[block.run];
    const uint8_t *new = (const uint8_t *)(intptr_t)run->new_at;
    int64_t at = block.begin * run->size;
    coder->sum = coder->old_sum = 0;
    body = encode_block(coder, old + run->at + at, new + at, block.begin, block.num, heads, body);
    if (overwrites) overwrite(coder, old + run->at + at, new + at, block.num, *heads);
    heads++;
    sums[block.run] += coder->sum;
    old_sums[block.run] += coder->old_sum;
  }
  *num_changes = coder->num_changes;
  return body - bodies;
}

int64_t weft_scratch_bytes(void) { return sizeof(Coder); }

// -- reading -----------------------------------------------------------------------

typedef struct {
  const uint8_t *body;
  int64_t at, end;  // in bits
} Reader;

// Return the bits from where a reader is on, at least 57 of them; behind its body's end they are 0.
INLINED uint64_t ahead(const Reader *in) {
  uint64_t word = 0;
  int64_t byte = in->at >> 3, left = (in->end >> 3) - byte;
  if (__builtin_expect(left >= 8, 1)) memcpy(&word, in->body + byte, 8);
  else memcpy(&word, in->body + byte, left);
  return word >> (in->at & 7);
}

INLINED uint64_t get(Reader *in, int num) {
  uint64_t word = ahead(in) & (((uint64_t)1 << num) - 1);
  in->at += num;
  return word;
}

// Read a quotient; -1 where none ends before the body does.
INLINED int64_t get_unary(Reader *in) {
  int64_t begin = in->at;
  while (in->at < in->end) {
    uint64_t word = ahead(in);
    if (word) {
      in->at += __builtin_ctzll(word) + 1;
      return in->at - begin - 1;
    }
    in->at += 64 - (in->at & 7);
  }
  return -1;
}

// Read the places of a list's entries, whose remainders and quotients lie apart.
static int get_places(Reader *remainders, Reader *quotients, int64_t count, int k, int64_t num,
                      uint16_t *places) {
  int64_t at = -1;
  for (int64_t i = 0; i < count; i++) {
    int64_t quotient = get_unary(quotients);
    if (quotient < 0) return NO_END;
    at += (quotient << k) + (int64_t)(k ? get(remainders, k) : 0) + 1;
    if (at >= num) return OUTSIDE;
    places[i] = (uint16_t)at;
  }
  return FINE;
}

typedef struct {
  uint16_t near[BLOCK], far[BLOCK];
  uint64_t seen[BLOCK / 64];
} Places;

// Changes as they are listed: of each the place in its run, and its bits before and after. The bits
// of a run begin at a multiple of 8 bytes.
typedef struct {
  int64_t num, num_bytes;
  uint32_t *at;
  uint8_t *olds, *news;
} Listed;

typedef struct {
  const Run *run;
  uint8_t *data;
  Weights weights;
  uint64_t sum, change;
  int writes;
  Listed *listed;  // NULL where none are
} Target;

INLINED void change(Target *to, int64_t index, int is_given, uint64_t value, int size) {
  const Run *run = to->run;
  uint8_t *at = to->data + run->at + elements_to(index, run->place_row, run->place_stride) * size;
  uint64_t old = load(at, size);
  if (!is_given) value = (value + old) & mask(size);
  if (!to->writes) {
    uint64_t own = weighed(run, index, &to->weights, size);
    to->sum += own * old;
    to->change += own * (value - old);
    if (to->listed) {
      Listed *listed = to->listed;
      listed->at[listed->num++] = (uint32_t)index;
      memcpy(listed->olds + listed->num_bytes, &old, size);
      memcpy(listed->news + listed->num_bytes, &value, size);
      listed->num_bytes += size;
    }
  } else {
    memcpy(at, &value, size);
  }
}

// Return whether any byte is not zero.
static int are_set(const uint8_t *at, const uint8_t *end) {
  while (at < end) if (*at++) return 1;
  return 0;
}

INLINED int decode_block(Target *to, const uint8_t *body, uint64_t head, int64_t begin, int64_t num,
                         Places *places, int size) {
  int64_t near = head & 0xFFFF, far = head >> 16 & 0xFFFF, given = head >> 32 & 0xFFFF;
  int64_t words = head >> 48;
  if (near == RAW) {
    if (are_set(body + num * size, body + 4 * words)) return NOT_ZERO;
    for (int64_t in = 0; in < num; in++) change(to, begin + in, 1, load(body + in * size, size), size);
    return FINE;
  }
  int near_bits = rice_bits(near, num), far_bits = rice_bits(far, num);
  int64_t signs = near * near_bits, remainders = signs + near;
  int64_t codes = remainders + far * far_bits, quotients = codes + 4 * far;
  if (quotients > 32 * words) return BLOCK_LENGTH;
  Reader in = {body, 0, 32 * words}, marks = {body, quotients, 32 * words};
  int wrong = get_places(&in, &marks, near, near_bits, num, places->near);
  if (wrong) return wrong;
  in.at = remainders;
  if ((wrong = get_places(&in, &marks, far, far_bits, num, places->far))) return wrong;
  int64_t rest = (marks.at + 7) / 8;
  if ((rest + given * size + 3) / 4 != words) return BLOCK_LENGTH;
  if (get(&marks, (int)(8 * rest - marks.at)) || are_set(body + rest + given * size, body + 4 * words))
    return NOT_ZERO;
  if (!to->writes && near && far) {
    memset(places->seen, 0, sizeof places->seen);
    for (int64_t i = 0; i < near; i++) places->seen[places->near[i] >> 6] |= (uint64_t)1 << (places->near[i] & 63);
    for (int64_t i = 0; i < far; i++)
      if (places->seen[places->far[i] >> 6] >> (places->far[i] & 63) & 1) return TWICE;
  }
  const uint8_t *memory = to->data + to->run->at + begin * size;  // of gaps that no processor foresees
  if (!to->run->place_stride) {
    for (int64_t i = 0; i < near; i++) __builtin_prefetch(memory + places->near[i] * size);
    for (int64_t i = 0; i < far; i++) __builtin_prefetch(memory + places->far[i] * size);
  }
  Reader near_signs = {body, signs, 32 * words};
  in.at = codes;
  for (int64_t i = 0, j = 0; i < near || j < far;) {
    if (j == far || (i < near && places->near[i] < places->far[j])) {
      change(to, begin + places->near[i++], 0, get(&near_signs, 1) ? (uint64_t)-1 : 1, size);
      continue;
    }
    int64_t at = begin + places->far[j++];
    uint64_t code = get(&in, 4);
    if (code == 15) return NO_STEP;
    if (code == LITERAL) {
      if (!given--) return GIVEN;
      change(to, at, 1, load(body + rest, size), size);
      rest += size;
    } else {
      change(to, at, 0, code < LITERAL ? code + 2 : 6 - code, size);
    }
  }
  return given ? GIVEN : FINE;
}

static int decode_sized(Target *to, const uint8_t *body, uint64_t head, int64_t begin, int64_t num, Places *places) {
  switch (to->run->size) {
    case 1: return decode_block(to, body, head, begin, num, places, 1);
    case 2: return decode_block(to, body, head, begin, num, places, 2);
    case 4: return decode_block(to, body, head, begin, num, places, 4);
    default: return decode_block(to, body, head, begin, num, places, 8);
  }
}

// Return what is wrong with the lengths in a payload. Tells where the changes of each run end among those of all.
int weft_check(const uint8_t *payload, int64_t num_bytes, const Run *runs, int64_t num_runs, int64_t *ends) {
  int64_t num_blocks = 0, num_words = 0, num_changes = 0;
  for (int64_t i = 0; i < num_runs; i++) num_blocks += (runs[i].num + BLOCK - 1) / BLOCK;
  int64_t head_bytes = 8 * (num_runs + num_blocks);
  if (num_bytes < head_bytes || num_bytes % 256) return TOO_SHORT;
  Block block = {0, 0, 0};
  for (const uint8_t *at = payload + 8 * num_runs; next_block(&block, runs, num_runs); at += 8) {
    uint64_t head = load(at, 8);
    int64_t near = head & 0xFFFF, far = head >> 16 & 0xFFFF, given = head >> 32 & 0xFFFF, words = head >> 48;
    int fits = near == RAW ? words == (block.num * runs[block.run].size + 3) / 4 && !far && !given
                           : near + far <= block.num && given <= far && (near + far || !words);
    if (!fits) return NUMBERS;
    num_words += words;
    num_changes += near == RAW ? block.num : near + far;
    ends[block.run] = num_changes;
  }
  int64_t used = head_bytes + 4 * num_words;
  if (num_bytes != (used + 255) / 256 * 256) return LENGTH;
  return are_set(payload + used, payload + num_bytes) ? NOT_ZERO : FINE;
}

// Read some blocks of a payload whose lengths are right against memory that holds the old elements, and overwrite these
// if `writes`: only after all were read. Adds to the sum of each run's old elements, and to what its digest changes by;
// lists the changes at their places among those of all, unless `ends` is NULL. Returns what is wrong.
int weft_apply(const uint8_t *payload, const Run *runs, int64_t num_runs, const uint64_t *columns, uint8_t *data,
               int writes, int64_t first_block, int64_t end_block, uint64_t *old_sums, uint64_t *changes,
               uint32_t *at, uint8_t *olds, uint8_t *news, const int64_t *ends, void *scratch) {
  int64_t num_blocks = 0, run = -1;
  for (int64_t i = 0; i < num_runs; i++) num_blocks += (runs[i].num + BLOCK - 1) / BLOCK;
  const uint8_t *heads = payload + 8 * num_runs, *body = heads + 8 * num_blocks;
  Listed listed = {0, 0, at, olds, news};
  Target to = {0, data, weights_of(columns), 0, 0, writes, ends ? &listed : 0};
  Block block = {0, 0, 0};
  for (int64_t nth = 0; nth < end_block && next_block(&block, runs, num_runs); nth++) {
    uint64_t head = load(heads + 8 * nth, 8);
    to.run = &runs[block.run];
    for (; run < block.run; run++) listed.num_bytes = (listed.num_bytes + 7) / 8 * 8;
    if (nth >= first_block && head) {
      to.sum = to.change = 0;
      int wrong = decode_sized(&to, body, head, block.begin, block.num, scratch);
      if (wrong) return wrong;
      old_sums[block.run] += to.sum;
      changes[block.run] += to.change;
    } else if (head) {
      int64_t near = head & 0xFFFF, num = near == RAW ? block.num : near + (int64_t)(head >> 16 & 0xFFFF);
      listed.num += num;
      listed.num_bytes += num * to.run->size;
    }
    body += 4 * (head >> 48);
  }
  return FINE;
}

static inline void write_run(const Run *run, const uint32_t *at, int64_t num, const uint8_t *values,
                             uint8_t *data, int size) {
  for (int64_t i = 0; i < num; i++)
    memcpy(data + run->at + elements_to(at[i], run->place_row, run->place_stride) * size,
           values + i * size, size);
}

// Write the listed elements of runs: those before, or those after.
void weft_write(const Run *runs, int64_t num_runs, const uint32_t *at, const uint8_t *values,
                const int64_t *ends, uint8_t *data) {
  int64_t begin = 0;
  for (int64_t i = 0; i < num_runs; begin = ends[i++]) {
    int64_t num = ends[i] - begin;
    switch (runs[i].size) {
      case 1: write_run(&runs[i], at + begin, num, values, data, 1); break;
      case 2: write_run(&runs[i], at + begin, num, values, data, 2); break;
      case 4: write_run(&runs[i], at + begin, num, values, data, 4); break;
      default: write_run(&runs[i], at + begin, num, values, data, 8);
    }
    values += (num * runs[i].size + 7) / 8 * 8;
  }
}
