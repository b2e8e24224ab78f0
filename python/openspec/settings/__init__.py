"""Settings of a command: flags, environment variables, a YAML file, keyword arguments.

The same name serves everywhere: `max_num_seqs` in YAML, `--max-num-seqs` as a flag,
`OPENSPEC_MAX_NUM_SEQS` in the environment. `spellings` has the names that others give them.
"""

from openspec.settings.command_line import parse_command_line
from openspec.settings.names import Names, nearest, with_revisions
from openspec.settings.setting import (
    ENV_PREFIX,
    EXPECTED,
    Raw,
    Setting,
    SettingsGroup,
    build,
    check_ranges,
    field_docs,
    format_bytes,
    group_of,
    number,
    parse_bytes,
)

__all__ = [
    "ENV_PREFIX",
    "EXPECTED",
    "Names",
    "Raw",
    "Setting",
    "SettingsGroup",
    "build",
    "check_ranges",
    "field_docs",
    "format_bytes",
    "group_of",
    "nearest",
    "number",
    "parse_bytes",
    "parse_command_line",
    "with_revisions",
]
