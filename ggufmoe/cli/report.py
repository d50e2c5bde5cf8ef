"""What a session did, as one line for people and as values for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from ..run.session import Session
from .output import bytes_text, printable


def session_facts(session: Session) -> dict[str, Any]:
    """The session's last answer and placement, for ``--json``."""
    timings, traffic = session.timings, session.executor.traffic
    facts: dict[str, Any] = {
        "prompt_tokens": timings.prompt_tokens if timings else 0,
        "answer_tokens": timings.answer_tokens if timings else 0,
        "prefill_tokens_per_s": timings.prefill_rate if timings else None,
        "decode_tokens_per_s": timings.decode_rate if timings else None,
        "decode_hit_rate": session.hit_rate,
        "decode_routings": traffic.decode,
        "prefill_routings": traffic.prefill,
        "cold_store": session.setup.cold_store,
        "threads": session.setup.n_threads,
        "context": session.setup.n_ctx,
    }
    prefetcher, uploads = session.engine.prefetcher, session.engine.uploads
    facts["uploads"] = {
        "experts": uploads.n_uploaded if uploads else 0,
        "seconds": uploads.busy_s if uploads else 0.0,
    }
    facts["prefetch"] = None if prefetcher is None else {**asdict(prefetcher.counts), "on": prefetcher.is_on}
    facts["devices"] = [
        {
            "device": use.device,
            "resident_experts": use.n_resident,
            "slot_bytes": use.slot_bytes,
            "work_bytes": use.work_bytes,
        }
        for use in session.slot_use()
    ]
    return facts


def closing_line(session: Session) -> str:
    """Tokens, rates, hit rate and what the slots take, in one line."""
    parts = []
    timings = session.timings
    if timings:
        parts.append(_rate(timings.prompt_tokens, "prompt tokens", timings.prefill_rate))
        if timings.answer_tokens:
            parts.append(_rate(timings.answer_tokens, "answer tokens", timings.decode_rate))
    if session.hit_rate is not None and any(use.n_resident for use in session.slot_use()):
        parts.append(f"hit rate {session.hit_rate:.0%}")
    for use in session.slot_use():
        if use.n_resident:
            parts.append(f"{use.n_resident} experts ({bytes_text(use.slot_bytes)}) on {use.device}")
    return "[" + ", ".join(parts) + "]"


def _rate(count: int, what: str, rate: float | None) -> str:
    return f"{count} {what}" + (f" at {rate:.1f}/s" if rate else "")


def warn(session: Session) -> None:
    """Say what a user should know of this session before it answers."""
    if session.options.routing_from is not None:
        click.echo(
            "Warning: the routing comes from a trace, not from the router: the text means nothing.", err=True
        )
    if session.setup.n_ctx > session.llama.n_ctx_train > 0:
        click.echo(
            printable(
                f"Warning: a context of {session.setup.n_ctx} tokens is more than the {session.llama.n_ctx_train} "
                "that the model was trained for; answers may degrade beyond them."
            ),
            err=True,
        )
