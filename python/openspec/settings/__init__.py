"""Settings of a command: flags, environment variables, a YAML file, keyword arguments.

The same name serves everywhere: `max_num_seqs` in YAML, `--max-num-seqs` as a flag,
`OPENSPEC_MAX_NUM_SEQS` in the environment. `spellings` has the names that others give them.
"""
