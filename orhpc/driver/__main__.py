"""The driver's program and its supervisor, which decides what follows a failure.

    python -m orhpc.driver RUN_DIR ATTEMPT --stop-file FILE [--on-line]

With ``--on-line`` it begins once a line comes on standard input, so that its imports, which take seconds, can
run while Ray starts; it exits if the input ends without one.

It reads the files that the node's launcher wrote to ``attempts/NNN`` (config, placement, keys), joins the
running Ray cluster and runs :func:`orhpc.driver.attempt.attempt_once` until it succeeds or the policy table
of :mod:`orhpc.errors` ends the process.  It produces events and an exit code.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from orhpc.driver.attempt import attempt_once
from orhpc.driver.bring_up import ray_connect
from orhpc.driver.run import Run
from orhpc.errors import (
    EXIT_FAILED,
    EXIT_OK,
    Action,
    NonFinite,
    OrhpcError,
    StopRequested,
    UserCodeError,
    policy_of,
)
from orhpc.process.terminal import protect_process
from orhpc.rundir import RunDir
from orhpc.rundir.storage import refusals

log = logging.getLogger("orhpc.driver")


async def supervise(run: Run, token_limit: int | None = None) -> int:
    """Run and restart attempts according to the policy table; returns the process's exit code."""
    failures, last_step = 0, -1
    if token_limit is not None:
        run.max_tokens = min(run.max_tokens, token_limit)
    while True:
        try:
            with refusals("the run directory refuses", below=run.rundir.path):
                await attempt_once(run, token_limit)
        except OrhpcError as error:
            policy = policy_of(error)
            reached = run.last_step
            failures = failures + 1 if reached <= last_step else 1
            last_step = max(last_step, reached)
            again = policy.action is not Action.END
            if isinstance(error, StopRequested):
                run.events.write("stopped", step=reached, reason=str(error))
                return policy.exit_code
            again = again and failures <= policy.budget and not run.stop_requested()
            log.error("%s: %s", type(error).__name__, error)
            trace = error.trace if isinstance(error, UserCodeError) else ""
            if trace:
                log.error("the traceback:\n%s", trace)
            run.events.write(
                "restart" if again else "failed",
                kind=type(error).__name__,
                error=str(error),
                exit_code=policy.exit_code,
                **({"trace": trace} if trace else {}),
            )
            if not again:
                return policy.exit_code
            if isinstance(error, NonFinite):
                run.copies.forget()  # the run returns to a commit, before the steps that led here
            await asyncio.sleep(min(30.0, 2.0**failures))
            if policy.action is Action.RESTART_SMALLER:
                run.max_tokens = max(1, run.max_tokens // 2)
            # The commit that is restored may be older than the failure that lowered the budget.
            lowered = run.max_tokens < run.config.train.max_tokens_per_gpu
            token_limit = run.max_tokens if lowered else None
        else:
            run.events.write("finished", step=run.config.train.steps)
            return EXIT_OK


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="orhpc.driver")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("attempt", type=int)
    parser.add_argument("--stop-file", type=Path, required=True)
    parser.add_argument("--max-tokens", type=int, help="token budget after the host ran out of memory")
    parser.add_argument("--on-line", action="store_true", help="begin at a line of standard input")
    options = parser.parse_args(arguments)
    if options.on_line and not sys.stdin.readline():
        return EXIT_FAILED
    run = Run(RunDir(options.run_dir), options.attempt, options.stop_file)
    protect_process(*run.config.secret_sources)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    try:
        ray_connect(run.placement, run.folder / "ray.token")
        return asyncio.run(supervise(run, options.max_tokens))
    except OrhpcError as error:
        code = policy_of(error).exit_code
        run.events.write("failed", kind=type(error).__name__, error=str(error), exit_code=code)
        return code
    except Exception as error:
        log.exception("a bug, or a failure without a class in errors.py")
        run.events.write("failed", kind=type(error).__name__, error=str(error)[:500], exit_code=EXIT_FAILED)
        return EXIT_FAILED
    finally:
        run.close()


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)  # skips Ray's shutdown, which takes three seconds: the launcher stops Ray
