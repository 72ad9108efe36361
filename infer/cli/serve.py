"""`headstart serve`: a target and a head behind OpenAI's API."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.cli import common
from infer.serve.settings import KEY_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from infer.engine import Engine
    from infer.learning import Learner
    from infer.serve.settings import ServeSettings
    from infer.target import TargetModel

HELP = """\
Serve a target and a head to clients of OpenAI's API: chats, completions, streams, tools and constrained
answers, many requests at once. Drafts only make answers sooner; which tokens they are, the target alone
decides. A page to chat with, which colours what was drafted, is at /."""

EXAMPLE = """\
headstart serve runs/demo/best --port 8000
headstart serve --target models/smollm2-135m --drafter ngram
headstart serve runs/demo/best --host 0.0.0.0 --api-key SECRET --max-requests 32 --max-length 2048

curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
     -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 100}'"""

USUAL_LENGTH = 4096
USUAL_REQUESTS, MOST_REQUESTS = 16, 256
USUAL_PORT = 8000

WANDB_PROJECT = "headstart-serve"

_PACKAGES = ("fastapi", "pydantic", "uvicorn", "prometheus_client")
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _check_packages()
    common.add_engine_arguments(parser, head_required=False)
    _add_place_arguments(parser.add_argument_group("server"))
    _add_bound_arguments(parser.add_argument_group("bounds"))
    _add_answer_arguments(parser.add_argument_group("answers"))
    common.add_tree_arguments(parser)
    _add_acceptance_arguments(parser.add_argument_group("acceptance"))
    from infer.serve import external

    external.add_arguments(parser)


def _add_place_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--drafter", metavar="SPEC", help="another name for HEAD: what drafts (default: none)")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)"
    )
    group.add_argument("--port", type=int, default=USUAL_PORT, metavar="N", help="0 takes any free one (default: 8000)")
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"a key that clients must give; may be repeated (default: the variable {KEY_VARIABLE}, else none)",
    )
    group.add_argument(
        "--model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="what clients call the model; may be repeated (default: the target's name)",
    )
    group.add_argument("--ssl-certfile", type=Path, metavar="FILE", help="serve https with this certificate")
    group.add_argument("--ssl-keyfile", type=Path, metavar="FILE", help="the certificate's private key")
    group.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a web page's origin that browsers may call from ('*': any); may be repeated (default: only the own page)",
    )
    group.add_argument(
        "--log-requests",
        action="store_true",
        help="a line for each request: id, route, status, tokens, seconds; no text",
    )


def _add_bound_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-requests",
        type=int,
        metavar="N",
        help=f"answers decoded at once (default: {USUAL_REQUESTS}, or what --memory holds)",
    )
    group.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help=f"most tokens of prompt and answer (default: the target's, {USUAL_LENGTH} at most)",
    )
    group.add_argument(
        "--prefix-reuse",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="take over the rows of earlier requests whose text begins alike (default: on)",
    )
    group.add_argument(
        "--memory", type=float, metavar="GB", help="memory for keys and values of the target: as many slots as it holds"
    )
    group.add_argument(
        "--max-waiting",
        type=int,
        default=256,
        metavar="N",
        help="answers that wait before clients get 429 (default: 256)",
    )
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="longest answer where a request does not say (default: what the context leaves to a chat, 16 to a "
        "completion)",
    )
    group.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="longest that a request may take (default: 600 s)"
    )
    group.add_argument(
        "--drain-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="longest that requests at hand go on after SIGTERM (default: 30)",
    )
    group.add_argument(
        "--prefill-chunk",
        type=int,
        metavar="N",
        help="tokens of prompts computed between two rounds of those that are being answered (default: as many as take "
        "five plain steps on this machine)",
    )


def _add_answer_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help="auto: requests that do not say draw as the target's generation_config.json recommends; none: with "
        "OpenAI's defaults (temperature 1)",
    )
    group.add_argument(
        "--tool-parser",
        choices=("auto", "hermes", "none"),
        default="auto",
        help="how calls of tools stand in answers; auto: hermes if the chat template speaks of <tool_call>",
    )
    group.add_argument(
        "--reasoning-parser",
        choices=("think", "none"),
        default="none",
        help="think: what stands within <think> is reasoning_content, and not content (default: none)",
    )


def _add_acceptance_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--acceptance-log",
        type=common.output_file,
        metavar="FILE",
        help="append acceptance by depth, tag, temperature and context to FILE once a minute, as JSON lines (no text)",
    )
    group.add_argument(
        "--wandb",
        action="store_true",
        help="log the same curves to Weights & Biases; offline without a key or a network (`wandb sync` uploads later)",
    )
    group.add_argument(
        "--wandb-project",
        metavar="NAME",
        help=f"W&B project (default: {WANDB_PROJECT}); implies --wandb",
    )


def run(args: argparse.Namespace, *, make_learner: Callable[[Engine], Learner] | None = None) -> int:
    """make_learner: what is to go on training the head of the engine that serves."""
    from infer.serve import external

    args.head = _head(args)
    keys = tuple(args.api_key) or tuple(filter(None, [os.environ.get(KEY_VARIABLE, "")]))
    if args.engine != external.OWN:
        place = external.Place(
            host=args.host, port=args.port, api_keys=keys, model_names=args.model_name, max_length=args.max_length
        )
        return external.serve(args, place)
    external.check_own(args)
    return _serve(args, keys, make_learner)


def _serve(args: argparse.Namespace, keys: tuple[str, ...], make_learner: Callable[[Engine], Learner] | None) -> int:
    from infer.serve import acceptance
    from infer.serve.run import Process, bind, serve

    process = Process(
        drain_seconds=args.drain_seconds,
        max_waiting=args.max_waiting,
        certificate=args.ssl_certfile,
        certificate_key=args.ssl_keyfile,
    )
    _check_bounds(args)
    listener = bind(args.host, args.port)
    try:
        target = common.load_target(args)
        settings = _settings(args, target, keys)
        engine = _engine(args, target)
        learner = None if make_learner is None else make_learner(engine)
        log = acceptance.open_log(
            engine,
            args.head,
            file=args.acceptance_log,
            wandb_project=args.wandb_project or (WANDB_PROJECT if args.wandb else None),
            notice=common.note,
        )
    except BaseException:
        listener.close()
        raise
    common.note(_engine_line(engine))
    return serve(engine, settings, process, listener, notice=common.note, acceptance=log, learner=learner)


def _head(args: argparse.Namespace) -> str:
    """HEAD, by either of its names."""
    if args.drafter is None:
        return str(args.head)
    if args.head != "none":
        raise ValueError(f"HEAD is {args.head} and --drafter {args.drafter}: they say the same, give one")
    return str(args.drafter)


def _check_bounds(args: argparse.Namespace) -> None:
    for name in ("max_requests", "max_length", "max_waiting", "max_tokens", "prefill_chunk", "memory", "timeout"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value}")
    if args.max_requests is not None and args.memory is not None:
        raise ValueError("--max-requests and --memory both say how many answers are decoded at once: give one")


def _settings(args: argparse.Namespace, target: TargetModel, keys: tuple[str, ...]) -> ServeSettings:
    from infer.serve.settings import ServeSettings

    template = str(getattr(target.tokenizer, "chat_template", None) or "")
    hermes = args.tool_parser == "hermes" or (args.tool_parser == "auto" and "<tool_call>" in template)
    recommended = {} if args.generation_config == "none" else recommended_sampling(target.model)
    if recommended:
        shown = ", ".join(f"{name} {value:g}" for name, value in recommended.items())
        common.note(f"requests that do not say draw with {shown} (the target's generation config)")
    return ServeSettings(
        host=args.host,
        port=args.port,
        api_keys=keys,
        model_names=tuple(args.model_name) or (_name_of(args, target),),
        default_max_tokens=args.max_tokens,
        sampling_defaults=recommended,
        max_seconds=args.timeout,
        allowed_origins=tuple(args.allow_origin),
        reasoning=None if args.reasoning_parser == "none" else args.reasoning_parser,
        tools="hermes" if hermes else None,
        log_requests=args.log_requests,
    )


def recommended_sampling(model: Any) -> dict[str, float]:
    """How a model's generation config would have it drawn, as far as it differs from transformers' defaults."""
    from infer.sampling import SamplingParams

    config = getattr(model, "generation_config", None)
    given = {} if config is None else config.to_diff_dict()
    values = {name: given[name] for name in _RECOMMENDED if given.get(name) is not None}
    SamplingParams(**values)
    return values


def _engine(args: argparse.Namespace, target: TargetModel) -> Engine:
    longest = min(args.max_length or USUAL_LENGTH, target.max_length)
    if args.max_length is not None and args.max_length > target.max_length:
        raise ValueError(f"--max-length {args.max_length} is more than the target's {target.max_length}")
    num_requests = args.max_requests or USUAL_REQUESTS
    if args.memory is not None:
        num_requests = _slots_in(args.memory, target, longest)
    # Trees as wide as pay for a request alone; under load the engine makes them narrower, or none.
    engine = common.build_engine(args, target, max_requests=num_requests, max_length=longest, drafts=True, batch=1)
    from infer.scheduling import Sharing

    engine.share(Sharing.among_callers(prefill_chunk=args.prefill_chunk or "auto", reuse_prefixes=args.prefix_reuse))
    return engine


def _slots_in(gigabytes: float, target: TargetModel, length: int) -> int:
    """How many requests of `length` tokens have room for their keys and values."""
    slot_bytes = target.new_cache(num_slots=1, num_columns=1).num_bytes * length
    slots = int(gigabytes * 1e9 / slot_bytes)
    if not slots:
        raise ValueError(
            f"--memory {gigabytes:g} holds no request of {length} tokens, which takes {slot_bytes / 1e9:.3g} GB: "
            "give more, or a smaller --max-length"
        )
    return min(slots, MOST_REQUESTS)


def _name_of(args: argparse.Namespace, target: TargetModel) -> str:
    """The target's Hub name, or the name of its folder."""
    name = str(args.target or target.reference.name)
    return Path(name).resolve().name if Path(name).is_dir() else name


def _engine_line(engine: Engine) -> str:
    drafter = "no drafts" if engine.drafter is None else f"drafts by {engine.drafter.name}"
    bounds = f"at most {engine.max_requests} at a time, each of {engine.max_length} tokens at most, prompt included"
    return f"{drafter}, exactness {engine.exactness}; {bounds}"


def _check_packages() -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"serving needs {', '.join(missing)}: pip install 'headstart[serve]'")
