"""Owns fetching a published question set with the modelscope client. Imported only where that is asked for:
the client takes seconds to load and needs the network.
"""

from pathlib import Path

from modelscope.hub.errors import (
    FileDownloadError,
    FileIntegrityError,
    InvalidParameter,
    NotExistError,
    NotLoginException,
    RequestError,
)
from modelscope.hub.snapshot_download import dataset_snapshot_download

from core.errors import DataError

NQ_HOTPOTQA = "PeterJinGo/nq_hotpotqa_train"
"""Search-R1's own training and test questions."""


FAULTS = (
    FileDownloadError,
    FileIntegrityError,
    InvalidParameter,
    NotExistError,
    NotLoginException,
    OSError,
    RequestError,
    ValueError,
)


def download_questions(name: str, revision: str, target: Path) -> list[Path]:
    """Download the Parquet and JSONL files of a data set; return them in order of name.

    Raises DataError when that fails or there are none.
    """
    try:
        folder = dataset_snapshot_download(
            name,
            revision=revision or None,
            local_dir=str(target),
            allow_file_pattern=["*.parquet", "*.jsonl"],
        )
    except FAULTS as error:
        raise DataError(
            f"cannot download the data set {name!r} ({type(error).__name__}); check the network, or fetch "
            "its Parquet files by other means and give their paths"
        ) from error
    files = sorted(path for path in Path(folder).rglob("*") if path.suffix in (".parquet", ".jsonl"))
    if not files:
        raise DataError(f"the data set {name!r} holds no Parquet or JSONL file")
    return files
