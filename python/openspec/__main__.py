"""`python -m openspec`, and the script `openspec`: the commands."""

import os
import sys

COMMANDS = {
    "serve": "the OpenAI-compatible server",
    "bench": "times a server with drafts and without, and compares the texts",
    "demo": "one answer of the embedded model, coloured by what drafted it",
    "doctor": "whether a drafter fits a model",
    "convert_drafter": "makes a draft model that openspec can read of one that it cannot",
    "adapt": "trains a draft head for a model of your own",
    "quantize": "makes a checkpoint in FP8 of one in bfloat16",
}


def main() -> int:
    """Becomes the named command; without a name, or with an unknown one, lists them."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        os.execv(sys.executable, [sys.executable, "-m", f"openspec.{name}", *arguments])
    is_asked = name in ("-h", "--help")
    lines = [] if is_asked else [f"openspec: there is no command {name!r}"]
    lines.append("Commands, each with --help; openspec NAME is the same, once it is installed:\n")
    lines += [f"  python -m openspec.{name:16} {purpose}" for name, purpose in COMMANDS.items()]
    print("\n".join(lines), file=sys.stdout if is_asked else sys.stderr)
    return 0 if is_asked else 2


if __name__ == "__main__":
    sys.exit(main())
