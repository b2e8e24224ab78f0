"""`python -m openspec`: the commands."""

COMMANDS = {
    "serve": "the OpenAI-compatible server",
    "bench": "times a server with drafts and without, and compares the texts",
    "demo": "one answer of the embedded model, coloured by what drafted it",
    "doctor": "whether a drafter fits a model",
    "convert_drafter": "makes a draft model that openspec can read of one that it cannot",
    "quantize": "makes a checkpoint in FP8 of one in bfloat16",
}

if __name__ == "__main__":
    print("Commands, each with --help:\n")
    for name, purpose in COMMANDS.items():
        print(f"  python -m openspec.{name:16} {purpose}")
