"""Start of vLLM: engine processes, OpenAI application, Weft's side of the workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from rollout_side.config import RolloutConfig
from rollout_side.memory.messages import unpacked
from rollout_side.spill.folder import SpillFolder, SpillSettings
from rollout_side.vllm_engine.compat import bridges, places, requests
from rollout_side.vllm_engine.http.middleware import (
    App,
    RequestTracker,
    explain_unknown_models,
    name_versions,
)
from rollout_side.vllm_engine.http.served_models import ServedModels
from rollout_side.vllm_engine.http.server import OpenAiServer, listen
from rollout_side.vllm_engine.loading.reload_proof import ReloadVerdict, engine_identity
from rollout_side.vllm_engine.replica import EngineParts, VllmReplica
from rollout_side.vllm_engine.server import capabilities, cpu_cache, refusals
from rollout_side.vllm_engine.server.capabilities import data_type, make_capabilities
from rollout_side.vllm_engine.server.engine_trial import EngineTrial
from rollout_side.vllm_engine.server.initial_checkpoint import InitialCheckpoint
from rollout_side.vllm_engine.server.requests_at_switch import RequestsAtSwitch
from rollout_side.vllm_engine.server.worker_calls import Deadlines
from rollout_side.vllm_engine.worker.holdings import HoldingsPage
from rollout_side.vllm_engine.worker.rank_results import check_results
from rollout_side.vllm_engine.worker.state import OpenConfig, WorkerDeclaration
from rollout_side.waits import read_within
from weft_rl.checkpoints.files import local_model_dir
from weft_rl.contract.errors import InvalidRequestError, TransferTimeoutError, UnsupportedError
from weft_rl.contract.names import BASE_POLICY, PolicyVersion
from weft_rl.contract.tensors import Reference, TensorMeta
from weft_rl.ipc.bytes_codec import bytes_codec

_log = logging.getLogger(__name__)

#: Class that vLLM mixes into its workers.
WORKER_EXTENSION = "rollout_side.vllm_engine.worker.extension.WeftWorker"
#: Factory of the receiver, called on the receiving rank.
DEFAULT_RECEIVER = "rollout_side.receive.receiver:Receiver"
_SHUTDOWN_SECONDS = 10
# Deadline of opening the spill directory, before the workers use it.
_OPEN_SECONDS = 30.0
#: Sampling defaults that RL trainers expect: log-probabilities after temperature, and no defaults
#: from the model's own generation_config.json.
RL_DEFAULTS: Final = {"logprobs_mode": "processed_logprobs", "generation_config": "vllm"}


async def open_engine(
    settings: RolloutConfig,
    *,
    receiver_factory: str = DEFAULT_RECEIVER,
    deadlines: Deadlines | None = None,
    on_step: Callable[[str], None] = lambda step: None,
) -> VllmReplica:
    """Start an engine on the running event loop, which it blocks meanwhile (minutes).

    Args:
        settings: Settings of the replica; its agent and its telemetry are not started here.
        receiver_factory: Dotted path ``module:name`` of a callable from a
            ``WorkerStore`` and a ``Tracer`` to a receiver.
        deadlines: Bounds of the engine's work; the defaults suit most models.
        on_step: Function called with the name of each step that takes long, as it begins.

    Returns:
        A replica that does not listen yet. It is ended by ``shutdown``.

    Raises:
        UnsupportedError: vLLM's version, its environment, or an argument that Weft cannot
            honour; or the engine fails at its first tokens.
        InvalidRequestError: vLLM refused its arguments or the model, the address is taken,
            or the spill directory cannot be made.
        Exception: vLLM's own, if the engine does not start.
    """
    refusals.refuse_environment(os.environ, allow=settings.allow_unversioned_changes)
    version = bridges.installed_version()
    places.check(version, bridges.check_version(version))
    # gRPC does not survive a fork, nor does a loop with threads.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    on_step("importing vLLM")
    parts = bridges.server_parts()
    args = parse_args(settings.vllm_args, parts, {} if settings.vllm_defaults else RL_DEFAULTS)
    refusals.refuse_backend(settings.backend)
    if settings.enable_sleep:
        refusals.refuse_sleep_without_gpu()
        args.enable_sleep_mode = True
    if settings.staging == "in-place":
        _log.info("bases are loaded in place: requests wait for each, and no copy is retained")
    running_requests = settings.running_requests
    if running_requests == "keep":
        refusals.refuse_keep(args)
        args.scheduler_cls = requests.SCHEDULER
    refusals.refuse_caches_beyond_reach(args, os.environ)
    refusals.refuse_ranks_on_cpu(args)
    refusals.refuse_experts_without_triton(args)
    if bridges.is_cpu():
        cpu_cache.size_cache(args, os.environ)
    async with contextlib.AsyncExitStack() as stack:
        sock = listen(settings.http_host, settings.http_port)
        stack.callback(sock.close)
        refusals.refuse_missing_model(args.model)
        initial_checkpoint = InitialCheckpoint(
            str(getattr(args, "load_format", "auto")), download_dir=args.download_dir
        )
        stack.callback(initial_checkpoint.close)
        initial_checkpoint.read(args.model, args.revision)  # while the engine warms up
        on_step(f"starting the engine of {args.model}")
        with refusals.plain_errors(args.model):
            engine = await stack.enter_async_context(parts.build_engine(args))
        tracker = RequestTracker()
        at_switch = RequestsAtSwitch(engine, running_requests)
        app = await _build_app(parts, args, engine)
        models = ServedModels(app.state.openai_serving_models)
        explaining = explain_unknown_models(app, models.explain_unknown)
        naming = name_versions(explaining, models, kept=running_requests == "keep")
        http = _http_server(app, naming, args, sock, tracker)
        config = engine.vllm_config
        model, revision = config.model_config.model, config.model_config.revision
        initial_checkpoint.read(model, revision, is_loaded=True)
        model_dir = local_model_dir(model, revision, config.load_config.download_dir)
        described = capabilities.build_reference(
            model_dir, config.model_config.hf_config, data_type(config.model_config.dtype)
        )
        drafts = capabilities.draft_files(config, model_dir, described)
        spill = _spill_settings(settings)
        if spill is not None:
            _make_folder(spill, described)
        holdings = HoldingsPage()
        stack.callback(holdings.close)
        on_step("preparing the workers for pushes")
        verdict = ReloadVerdict(engine_identity(config, version, model_dir))
        opened = OpenConfig(
            staging_memory_bytes=settings.staging_memory_bytes,
            adapter_memory_bytes=settings.adapter_memory_bytes,
            staging=settings.staging,
            backend=settings.backend,
            base_copies=0 if settings.staging == "in-place" else settings.base_copies,
            receiver_factory=receiver_factory,
            replica_pid=os.getpid(),
            holdings_path=holdings.path,
            ranks_secret=secrets.token_hex(32),
            reference=described,
            draft_files=drafts,
            in_memory=tuple(capabilities.memory_modules(config.model_config.hf_config, described)),
            spill=spill,
            traced_as=settings.agent.replica_id if settings.telemetry.traces else "",
            reload_verdict=verdict.get(),
        )
        args_of_open = (bytes_codec(OpenConfig).pack(opened),)
        values = check_results(await engine.collective_rpc("weft_open", args=args_of_open))
        declared = [unpacked(WorkerDeclaration, value["declaration"]) for value in values]
        verdict.put([each.reload_verdict for each in declared])
        described = await with_common_draft(
            engine, described, drafts, [each.draft for each in declared]
        )
        described = replace(
            described.sent_as_float32(declared[0].sent_as_float32),
            untold_modules=declared[0].untold_modules,
        )
        on_step("generating its first tokens")
        await EngineTrial(engine, at_switch.generate, at_switch.caches).run()
        await bridges.set_weight_version(engine, str(PolicyVersion(BASE_POLICY, 0)))
        return VllmReplica(
            EngineParts(
                engine=engine,
                holdings=holdings,
                models=models,
                http=http,
                tracker=tracker,
                requests=at_switch,
                initial_checkpoint=initial_checkpoint,
                cleanup=stack.pop_all(),
            ),
            capabilities=make_capabilities(
                config,
                described,
                settings,
                declared,
                engine_version=version,
                served_names=models.own_names,
            ),
            reference=described,
            model_name=models.base_name,
            worker_pids=tuple(each.pid for each in declared),
            deadlines=deadlines or Deadlines(),
            spill_folder=SpillFolder(spill, described.fingerprint) if spill else None,
        )


async def with_common_draft(
    engine: Any, described: Reference, files: Sequence[TensorMeta], loaded: Sequence[Sequence[str]]
) -> Reference:
    """Return the reference with the draft that every rank loads; without one, tell the ranks, which
    would load tensors that another replica declares."""
    agreed = all(names == loaded[0] for names in loaded)
    if not agreed:
        _log.warning("the model that drafts tokens stays as it is: ranks differ in what they load")
    drafted = capabilities.with_draft(described, files, loaded[0] if agreed else ())
    if any(loaded) and not drafted.draft:
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                check_results(await engine.collective_rpc("weft_keep_draft", args=()))
        except TimeoutError:
            raise TransferTimeoutError(
                f"a worker of the engine did not answer within {_OPEN_SECONDS:g} s: start it again"
            ) from None
    return drafted


def _spill_settings(settings: RolloutConfig) -> SpillSettings | None:
    if not settings.spill_dir:
        return None
    return SpillSettings(
        directory=settings.spill_dir,
        capacity_bytes=settings.spill_bytes,
        owner=settings.agent.replica_id,
    )


def _make_folder(spill: SpillSettings, described: Reference) -> None:
    try:
        folder = SpillFolder(spill, described.fingerprint)
        read_within(_OPEN_SECONDS, spill.directory, folder.open)
    except (OSError, TransferTimeoutError) as error:
        raise InvalidRequestError(
            f"--spill-dir {spill.directory} cannot be used: {error}; give a directory that this "
            "process may write to"
        ) from error


def parse_args(
    vllm_args: Sequence[str], parts: bridges.ServerParts, defaults: Mapping[str, str]
) -> Namespace:
    """Parse ``vllm serve``'s arguments and add those that Weft needs."""
    parser = parts.make_arg_parser(parts.argument_parser())
    parser.set_defaults(**defaults)
    cpu_cache.mark_default(parser)
    words: list[str] = []
    for word in vllm_args:  # vLLM says nothing of --config=FILE, and does not read the file
        words += word.split("=", 1) if word.startswith("--config=") else [word]
    with refusals.plain_argument_errors(words):
        args = parser.parse_args(words)
    used = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in defaults.items()
        if getattr(args, name) == value
    ]
    if used:
        _log.info("for RL: %s (--vllm-defaults leaves vLLM's)", ", ".join(used))
    if getattr(args, "model_tag", None):
        args.model = args.model_tag
    refusals.refuse_unsupported(args)
    if getattr(args, "worker_extension_cls", ""):
        raise UnsupportedError(
            f"--worker-extension-cls {args.worker_extension_cls} cannot be used: Weft sets its "
            f"own, {WORKER_EXTENSION}; start the replica without it"
        )
    args.worker_extension_cls = WORKER_EXTENSION
    with refusals.plain_argument_errors(words):
        parts.validate_args(args)
    return args  # type: ignore[no-any-return]


async def _build_app(parts: bridges.ServerParts, args: Namespace, engine: Any) -> Any:
    tasks = await engine.get_supported_tasks()
    app = parts.build_app(args, tasks, engine.model_config)
    refusals.close_endpoints(app)
    await parts.init_app_state(engine, app.state, args, tasks)
    return app


def _http_server(
    app: Any, inner: App, args: Namespace, sock: socket.socket, tracker: RequestTracker
) -> OpenAiServer:
    tls = {
        name: getattr(args, name)
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs")
        if getattr(args, name, None)
    }
    server = OpenAiServer(
        tracker.wrap(inner),
        sock,
        tls=tls,
        settings={
            "log_level": args.uvicorn_log_level,
            "access_log": not args.disable_uvicorn_access_log,
            "timeout_graceful_shutdown": _SHUTDOWN_SECONDS,
            "log_config": None,
        },
    )
    app.state.server = server.server  # vLLM's error handlers stop it when the engine died
    return server
