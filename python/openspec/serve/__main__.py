"""`python -m openspec.serve [MODEL]`: the OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Sequence

import openspec
from openspec.config import parse_engine_args
from openspec.engine.processes.log import log_to_stderr, open_standard_files
from openspec.engine.processes.standby import Standby
from openspec.engine.start_phases import Phases, process_age_s
from openspec.errors import ConfigError, EngineError, check_is_built, out_of_memory
from openspec.serve.config import ServeConfig, check_drafter_access
from openspec.serve.server.listening import bound_socket
from openspec.settings.setting import build, group_of

logger = logging.getLogger(__name__)

DESCRIPTION = """\
OpenAI-compatible server. Every flag is also a YAML key and an environment variable.

The flags that matter first:

  MODEL, --method, --draft-model           what answers, and what drafts for it
  --host, --port, --api-key                where it listens, and for whom
  --max-model-len, --max-num-seqs          how long a text, and how many at a time
  --gpu-memory-utilization                 how much of the GPU it takes; on CPU: --kv-cache-memory
  --replicas, --devices                    an engine on each of several GPUs
  --tensor-parallel-size                   a model that several GPUs share

Examples:

  python -m openspec.serve                                       the embedded model
  python -m openspec.serve Qwen/Qwen3-8B --port 8001             drafts copied from the text
{heads}
  python -m openspec.serve Qwen/Qwen3-8B --max-model-len 32768 --max-num-seqs 16 --replicas 4
  OPENSPEC_API_KEY=secret python -m openspec.serve --host 0.0.0.0

Which method and which head for which model: docs/your_model.md.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server; returns the exit status."""
    open_standard_files()
    try:
        engine_config, values = parse_engine_args(
            "python -m openspec.serve",
            DESCRIPTION,
            argv,
            [group_of("server", ServeConfig)],
        )
        config = build(ServeConfig, values)
        config.check()
        check_drafter_access(config, engine_config)
        check_is_built()
        log_to_stderr(config.log_level.upper(), "server")
        for library in ("uvicorn", "httpx", "httpx2"):  # the latter two: downloads from the hub
            logging.getLogger(library).setLevel(logging.WARNING)
        logger.info(
            "openspec %s starts with %s, method %s",
            openspec.__version__,
            engine_config.model or "the embedded model",
            engine_config.method,
        )
        with bound_socket(config) as sock, contextlib.closing(Standby()) as standby:
            folders = engine_config.with_folders()  # may download: an address in use shows before
            phases = Phases(process_age_s())
            phases.end("settings")
            standby.prepare()  # an engine's process imports while this one does
            # Here, so that --help, a wrong flag and the first line do not wait for it.
            from openspec.serve.server.run import serve

            serve(engine_config, folders, config, sock, standby, phases)
    except (ConfigError, EngineError) as error:
        logging.shutdown()  # the lines before this one
        message = " ".join(str(error).split())
        sys.stderr.write(f"openspec.serve: {message}\n")
        return 1
    except MemoryError as error:
        sys.stderr.write(f"openspec.serve: {out_of_memory(error)}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
