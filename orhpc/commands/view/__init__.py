"""``orhpc view``: the recorded rollouts of a run as text, in the terminal, as a local page, or as a file.

``library`` reads the record; the four outputs show the same dictionaries: ``text`` prints, ``terminal`` is a
Textual application, ``server`` and ``export`` share the page in ``assets``.  Everything that a model or an
environment wrote is untrusted text: terminals get it without control characters, the page only as text nodes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from orhpc.commands.packages import need
from orhpc.commands.run_state import RUN_HELP, existing_run
from orhpc.commands.view import filter as filters
from orhpc.errors import EXIT_OK, ConfigError

_MEGABYTES = 25
"""An exported file of this size still goes through most mail servers."""


def add_view(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``orhpc view``."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "--step", type=int, help="default: the newest recorded step, or the one with --rollout"
    )
    parser.add_argument(
        "--evaluation", type=int, metavar="STEP", help="the evaluation after this step (0: before training)"
    )
    parser.add_argument("--rollout", metavar="ID", help="print this rollout (GROUP.SAMPLE)")
    parser.add_argument("--filter", default="", metavar="WORDS", help=filters.HELP)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--text", action="store_true", help="print; the default if the output is no terminal")
    output.add_argument("--web", action="store_true", help="serve a page to this machine alone")
    output.add_argument("--export", type=Path, metavar="FILE", help="write the page with its data to a file")
    parser.add_argument("--port", type=int, default=0, help="of --web; default: a free one")
    parser.add_argument(
        "--megabytes", type=float, default=_MEGABYTES, help=f"most data of --export; default: {_MEGABYTES}"
    )
    parser.set_defaults(run=view)


def view(options: argparse.Namespace) -> int:
    """Show the rollouts of a run in the way that the options ask for."""
    need("h5py", "numpy", "starlette", "textual", "tokenizers")
    from orhpc.commands.view.library import Library  # loads h5py, which other commands do without
    from orhpc.commands.view.tokens import TokenTexts

    run = existing_run(options.run_dir)
    _refuse_contradictions(options)
    wanted = filters.Filter.parse(options.filter)
    one_part = options.step is not None or options.evaluation is not None
    to_text = options.text or bool(options.rollout or options.filter) or not sys.stdout.isatty()
    if to_text and not options.web and options.export is None:
        from orhpc.commands.view import text

        library = Library(run, TokenTexts(None))
        return text.show(library, options.step, options.evaluation, options.rollout, options.filter)
    first = None
    if one_part:
        first = Library(run, TokenTexts(None)).chosen(options.step, options.evaluation)[0]
    library = Library(run, TokenTexts.of(run), first)
    if options.export is not None:
        from orhpc.commands.view.export import write_page

        most = int(options.megabytes * 1e6)
        count, left_out = write_page(library, options.export, wanted, first, most)
        print(f"{options.export}: {count} rollouts{f'; {left_out}' if left_out else ''}")
        return EXIT_OK
    if options.web:
        from orhpc.commands.view.server import serve

        return serve(library, run.path.resolve().name, options.port)
    from orhpc.commands.view.terminal import Viewer

    return Viewer(library).run() or EXIT_OK


def _refuse_contradictions(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that do not go together."""
    if options.step is not None and options.evaluation is not None:
        raise ConfigError("--step and --evaluation: give one of them")
    if options.rollout is not None and (options.web or options.export is not None):
        raise ConfigError("--rollout prints one rollout: leave out --web or --export")
    if options.filter and options.web:
        raise ConfigError("--filter: the page of --web has its own filters")
    if options.port and not options.web:
        raise ConfigError("--port is the port of --web")
    if not options.megabytes > 0:
        raise ConfigError("--megabytes must be above 0")
