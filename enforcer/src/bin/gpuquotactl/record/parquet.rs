//! The rows of a recording as a Parquet file: the columns of the text, each with its type, and absent where it is empty there.

use std::{io::Write, sync::Arc};

use parquet::{
    basic::{LogicalType, Repetition, Type as Physical},
    data_type::{ByteArray, ByteArrayType, DataType, DoubleType, Int32Type, Int64Type},
    errors::{ParquetError, Result},
    file::{
        properties::WriterProperties,
        writer::{SerializedFileWriter, SerializedRowGroupWriter},
    },
    schema::types::{Type, TypePtr},
};

use super::table::Row;

/// Rows that are written at once; so many are kept in memory.
const GROUP: usize = 1 << 16;

/// A file that is being written.
pub struct Rows<W: Write + Send> {
    file: SerializedFileWriter<W>,
    kept: Vec<Row>,
}

/// The columns, as in [`super::table::HEAD`].
fn schema() -> Result<TypePtr> {
    let column = |name: &str, physical, logical, is_there: bool| {
        Type::primitive_type_builder(name, physical)
            .with_repetition(if is_there {
                Repetition::REQUIRED
            } else {
                Repetition::OPTIONAL
            })
            .with_logical_type(logical)
            .build()
            .map(Arc::new)
    };
    let natural = |bits| Some(LogicalType::integer(bits, false));
    let columns = vec![
        column("time_seconds", Physical::DOUBLE, None, true)?,
        column("gpu", Physical::INT32, natural(32), true)?,
        column(
            "tenant",
            Physical::BYTE_ARRAY,
            Some(LogicalType::String),
            false,
        )?,
        column("gpu_percent", Physical::INT32, natural(32), false)?,
        column("memory_bytes", Physical::INT64, natural(64), true)?,
        column("memory_percent", Physical::INT32, natural(32), false)?,
        column("power_watts", Physical::DOUBLE, None, false)?,
    ];
    let whole = Type::group_type_builder("recording").with_fields(columns);
    whole.build().map(Arc::new)
}

impl<W: Write + Send> Rows<W> {
    /// Begins a file.
    pub fn new(out: W) -> Result<Self> {
        let file = SerializedFileWriter::new(out, schema()?, Arc::new(WriterProperties::new()))?;
        Ok(Self {
            file,
            kept: Vec::new(),
        })
    }

    /// Adds a row.
    pub fn put(&mut self, row: Row) -> Result<()> {
        self.kept.push(row);
        if self.kept.len() >= GROUP {
            self.flush()?;
        }
        Ok(())
    }

    /// Ends the file: without its end it cannot be read.
    pub fn finish(mut self) -> Result<()> {
        self.flush()?;
        self.file.close().map(drop)
    }

    fn flush(&mut self) -> Result<()> {
        let rows = std::mem::take(&mut self.kept);
        if rows.is_empty() {
            return Ok(());
        }
        let mut group = self.file.next_row_group()?;
        let out = &mut group;
        required::<DoubleType, W>(out, rows.iter().map(|row| row.at.as_secs_f64()))?;
        required::<Int32Type, W>(out, rows.iter().map(|row| row.gpu.cast_signed()))?;
        let names = rows.iter().map(|row| row.tenant.as_deref());
        optional::<ByteArrayType, W>(out, names.map(|name| name.map(ByteArray::from)))?;
        let percents = rows.iter().map(|row| row.percent.map(u32::cast_signed));
        optional::<Int32Type, W>(out, percents)?;
        required::<Int64Type, W>(out, rows.iter().map(|row| row.memory.cast_signed()))?;
        let rests = || rows.iter().map(|row| row.rest);
        let percents = rests().map(|rest| rest.map(|rest| rest.memory_percent.cast_signed()));
        optional::<Int32Type, W>(out, percents)?;
        let power = rests().map(|rest| rest?.power_mw.map(|power| f64::from(power) / 1000.0));
        optional::<DoubleType, W>(out, power)?;
        group.close().map(drop)
    }
}

/// Writes the next column, of which every row has a value.
fn required<T: DataType, W: Write + Send>(
    group: &mut SerializedRowGroupWriter<'_, W>,
    values: impl Iterator<Item = T::T>,
) -> Result<()> {
    let values: Vec<T::T> = values.collect();
    write::<T, W>(group, &values, None)
}

/// Writes the next column, of which some rows have a value.
fn optional<T: DataType, W: Write + Send>(
    group: &mut SerializedRowGroupWriter<'_, W>,
    values: impl Iterator<Item = Option<T::T>>,
) -> Result<()> {
    let values: Vec<Option<T::T>> = values.collect();
    let is_there: Vec<i16> = values.iter().map(|value| value.is_some().into()).collect();
    let there: Vec<T::T> = values.into_iter().flatten().collect();
    write::<T, W>(group, &there, Some(&is_there))
}

fn write<T: DataType, W: Write + Send>(
    group: &mut SerializedRowGroupWriter<'_, W>,
    values: &[T::T],
    is_there: Option<&[i16]>,
) -> Result<()> {
    let mut column = group
        .next_column()?
        .ok_or_else(|| ParquetError::General("more columns than the schema has".to_owned()))?;
    column.typed::<T>().write_batch(values, is_there, None)?;
    column.close()
}

#[cfg(test)]
mod tests {
    use std::{fs::File, time::Duration};

    use parquet::{
        file::reader::{FileReader as _, SerializedFileReader},
        record::{Field, Row as Read},
    };

    use super::{
        super::table::{HEAD, Rest},
        *,
    };

    fn written(rows: impl IntoIterator<Item = Row>) -> SerializedFileReader<File> {
        let file = tempfile::tempfile().expect("a file");
        let mut out = Rows::new(&file).expect("a schema");
        for row in rows {
            out.put(row).expect("written");
        }
        out.finish().expect("an end");
        SerializedFileReader::new(file).expect("readable")
    }

    fn card(at: u64) -> Row {
        Row {
            at: Duration::from_micros(at),
            gpu: 1,
            tenant: None,
            percent: Some(97),
            memory: u64::MAX - 5,
            rest: Some(Rest {
                memory_percent: 30,
                power_mw: Some(512_340),
            }),
        }
    }

    fn fields(row: &Read) -> Vec<Field> {
        row.get_column_iter()
            .map(|(_, field)| field.clone())
            .collect()
    }

    #[test]
    fn what_is_written_is_read() {
        let tenant = Row {
            tenant: Some("a, \"b\" ü".into()),
            percent: None,
            memory: 7,
            rest: None,
            ..card(9_000)
        };
        let file = written([card(5_003), tenant]);
        let rows: Vec<Read> = file
            .get_row_iter(None)
            .expect("rows")
            .collect::<Result<_>>()
            .expect("readable");
        let names: Vec<&String> = rows[0].get_column_iter().map(|(name, _)| name).collect();
        assert_eq!(names, HEAD.trim_end().split(',').collect::<Vec<_>>());
        assert_eq!(
            fields(&rows[0]),
            [
                Field::Double(0.005_003),
                Field::UInt(1),
                Field::Null,
                Field::UInt(97),
                Field::ULong(u64::MAX - 5),
                Field::UInt(30),
                Field::Double(512.34),
            ]
        );
        assert_eq!(
            fields(&rows[1])[1..],
            [
                Field::UInt(1),
                Field::Str("a, \"b\" ü".into()),
                Field::Null,
                Field::ULong(7),
                Field::Null,
                Field::Null,
            ]
        );
    }

    #[test]
    fn a_long_recording_is_written_in_groups() {
        let all = GROUP + 10;
        let file = written((0..all as u64).map(card));
        assert_eq!(file.num_row_groups(), 2);
        let times: Vec<f64> = file
            .get_row_iter(None)
            .expect("rows")
            .map(|row| match fields(&row.expect("readable"))[0] {
                Field::Double(at) => at,
                ref other => panic!("{other}"),
            })
            .collect();
        assert_eq!(times.len(), all);
        assert!(times.is_sorted());
    }

    #[test]
    fn nothing_recorded_is_a_file_without_rows() {
        let file = written([]);
        assert_eq!(file.get_row_iter(None).expect("rows").count(), 0);
    }
}
