"""One table of an export as Parquet, every column of its own type."""

from datetime import datetime
from typing import BinaryIO

import pyarrow
from pyarrow.parquet import ParquetWriter

from service.export_tables import Kind, columns_of, pages_of
from service.exports import Moment, Table

ROWS_IN_A_GROUP = 20_000
TYPES: dict[Kind, pyarrow.DataType] = {
    bool: pyarrow.bool_(),
    int: pyarrow.int64(),
    float: pyarrow.float64(),
    str: pyarrow.string(),
    datetime: pyarrow.timestamp("us", tz="UTC"),
}


def write_parquet(moment: Moment, table: Table, file: BinaryIO) -> None:
    """What is not known is null, whatever the type. The moment is in the schema's metadata, too."""
    columns = columns_of(moment, table)
    about = {"fraternal.sweep_id": moment.record.id, "fraternal.exported_at": moment.at.isoformat()}
    schema = pyarrow.schema([(name, TYPES[kind]) for name, kind in columns.items()], metadata=about)
    with ParquetWriter(file, schema, compression="zstd") as writer:
        waiting: list[pyarrow.RecordBatch] = []
        for page in pages_of(moment, table, columns):
            arrays = [pyarrow.array(values, field.type) for field, values in zip(schema, page, strict=True)]
            waiting.append(pyarrow.record_batch(arrays, schema=schema))
            if sum(batch.num_rows for batch in waiting) >= ROWS_IN_A_GROUP:
                writer.write_table(pyarrow.Table.from_batches(waiting, schema))
                waiting.clear()
        writer.write_table(pyarrow.Table.from_batches(waiting, schema))
