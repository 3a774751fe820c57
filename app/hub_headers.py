"""Headers of files on the Hugging Face hub, without the data: enough to plan before a download."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from app.hub import HubModel, Listing, chosen_files, quantisations
from moebius.checkpoint.gguf.header import CutHeaderError, read_header
from moebius.errors import UserError

# Vocabularies make headers of 5 to 15 MB; a part after the first has some KiB.
_FIRST_BYTES, _TIMEOUT_S = 1 << 20, 30.0


def fetch_headers(model: HubModel, listing: Listing, directory: Path) -> dict[str, tuple[Path, ...]]:
    """Returns every quantisation of a repository as files of their full size that hold a header and else
    nothing.

    The files take in `directory` what their headers take; the bytes after them read as zero. Returns their
    paths by quantisation, ascending: of all that are there, or of the one that `model` names.

    Raises:
        UserError: there is no such quantisation, or its files cannot be had.
        CheckpointError: one of them has no header.
    """
    names = list(listing.sizes)
    wanted = model.quantisation.upper()
    kinds = {wanted: chosen_files(model, names)} if wanted else quantisations(names)
    files = [name for _, names in sorted(kinds.items()) for name in names]
    print(f"reading {len(files)} headers of {model.repository}", file=sys.stderr, flush=True)
    for name in files:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _fetch_header(model.repository, listing.commit, name, listing.sizes[name], path)
    return {kind: tuple(directory / name for name in names) for kind, names in sorted(kinds.items())}


def safetensors_headers(model: HubModel, listing: Listing) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Yields name, type, shape and bytes of each tensor in a repository's safetensors.

    Raises UserError where the headers cannot be had.
    """
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        found = HfApi().get_safetensors_metadata(model.repository, revision=listing.commit)
    except (httpx2.HTTPError, HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError) as error:
        raise UserError(f"{model.repository}: headers cannot be read: {str(error).splitlines()[0]}") from None
    for _, file in sorted(found.files_metadata.items()):
        for name, info in file.tensors.items():
            begin, end = info.data_offsets
            yield name, str(info.dtype), tuple(info.shape), end - begin


def _fetch_header(repository: str, commit: str, name: str, size: int, path: Path) -> None:
    """Asks for twice as many bytes until the header is whole. Raises UserError, CheckpointError."""
    wanted = _FIRST_BYTES
    with path.open("wb") as file:
        while True:
            file.write(_range(repository, commit, name, file.tell(), min(wanted, size)))
            file.flush()
            try:
                read_header(path)
                break
            except CutHeaderError:
                if file.tell() >= size:
                    raise
            wanted *= 2
    os.truncate(path, size)


def _range(repository: str, commit: str, name: str, begin: int, end: int) -> bytes:
    """Returns bytes `begin` to `end` of one file. Raises UserError."""
    import httpx2
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined]

    url = hf_hub_url(repository, name, revision=commit)
    headers = build_hf_headers() | {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
    try:
        # A hub that knows no ranges sends all: no more is read than was asked for.
        with get_session().stream(
            "GET", url, headers=headers, follow_redirects=True, timeout=_TIMEOUT_S
        ) as answer:
            answer.raise_for_status()
            skipped = 0 if answer.status_code == httpx2.codes.PARTIAL_CONTENT else begin
            wanted, data = skipped + end - begin, bytearray()
            for piece in answer.iter_bytes():
                data += piece
                if len(data) >= wanted:
                    break
    except httpx2.HTTPError as error:
        raise UserError(f"{repository}: {name} cannot be read: {str(error).splitlines()[0]}") from None
    found = bytes(data[skipped:wanted])
    if len(found) < end - begin:
        raise UserError(f"{repository}: {name} ends at byte {begin + len(found)} of {end} at least")
    return found
