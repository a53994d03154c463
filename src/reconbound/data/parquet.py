"""Parquet files as frames, read by pyarrow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from reconbound._internal.checks import DataError, DataMissing
from reconbound.data.csv import check_names

if TYPE_CHECKING:
    from pandas import DataFrame

ENDING = ".parquet"
#: Bytes that the columns may hold: a few kilobytes can be made to hold more than any memory.
MOST_UNPACKED = 2**30


def read_parquet(path: Path) -> DataFrame:
    """Reads a Parquet file; columns of text come as text, columns of a dictionary type as categories.

    Raises:
        DataError: where the file is damaged, or holds more than 1 GB.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if not path.exists():
            raise DataMissing(f"{path} does not exist")
        facts, schema = pq.read_metadata(path), pq.read_schema(path)
        stored = sum(facts.row_group(k).total_byte_size for k in range(facts.num_row_groups))
        if max(stored, 8 * facts.num_rows * facts.num_columns) > MOST_UNPACKED:
            raise DataError(f"{path}: holds more than {MOST_UNPACKED >> 20:,} MB; leave columns or rows out")
        check_names(str(path), schema.names, "")
        texts = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
        with pq.ParquetFile(path, read_dictionary=texts) as file:  # equal texts are kept once, however often they come
            frame: DataFrame = file.read(use_threads=False).to_pandas(ignore_metadata=True)
            return frame.astype(dict.fromkeys(texts, object))
    except (DataError, MemoryError):
        raise
    except Exception as reason:  # pyarrow has many ways to say that a file is damaged
        words = " ".join(str(reason).split())
        raise DataError(f"{path}: damaged or not a Parquet file ({words[:160]})") from None
