"""What AWS's compiler has put into its own cache, file by file, so that other caches can be given the same."""

from pathlib import Path

from nxpipe.pipeline.compile.artifact_files import cached
from nxpipe.pipeline.compile.neuronx.cache_entry import EntryState, folder_of, is_exported, state_of


def cache_entries(cache: Path, program: str) -> dict[str, bytes]:
    """Finished entries, by their files' paths in an artifact. Mostly none: tracing is documented not to be cached."""
    found: dict[str, bytes] = {}
    for folder in sorted(cache.glob("*/*/")):
        files = sorted(path for path in folder.iterdir() if path.is_file())
        if state_of([path.name for path in files]) is EntryState.READY:
            for path in files:
                where = path.relative_to(cache).as_posix()
                if folder_of(where) and is_exported(path.name):
                    found[cached(program, where)] = path.read_bytes()
    return found
