//! Where the rows of a recording go.

use std::{
    fs::File,
    io::{self, BufWriter, Write as _},
    path::Path,
};

#[cfg(feature = "parquet")]
use super::parquet::Rows;
use super::table::{self, Row};
use crate::{args::RecordFormat, error::Error};

/// A file that is being written.
pub enum Sink {
    /// As text.
    Csv(BufWriter<File>),
    /// As Parquet.
    #[cfg(feature = "parquet")]
    Parquet(Box<Rows<BufWriter<File>>>),
}

/// Whether this program can write a format, asked before anything is done.
pub fn known(format: RecordFormat) -> Result<(), Error> {
    if cfg!(feature = "parquet") || format == RecordFormat::Csv {
        return Ok(());
    }
    Err(Error::Usage(
        "this gpuquotactl was built without Parquet: use --format csv, or build it with \
         `cargo build --release -p gpuquota-enforcer --features parquet`"
            .to_owned(),
    ))
}

impl Sink {
    /// Begins a file.
    pub fn create(path: &Path, format: RecordFormat) -> Result<Self, Error> {
        known(format)?;
        let begin = || {
            let mut file = BufWriter::new(File::create(path)?);
            Ok(match format {
                #[cfg(feature = "parquet")]
                RecordFormat::Parquet => {
                    Self::Parquet(Box::new(Rows::new(file).map_err(io::Error::other)?))
                }
                _ => {
                    file.write_all(table::HEAD.as_bytes())?;
                    Self::Csv(file)
                }
            })
        };
        begin().map_err(|source| Error::File {
            path: path.to_owned(),
            source,
        })
    }

    /// Adds a row.
    pub fn put(&mut self, row: &Row) -> io::Result<()> {
        match self {
            Self::Csv(file) => file.write_all(row.line().as_bytes()),
            #[cfg(feature = "parquet")]
            Self::Parquet(rows) => rows.put(row.clone()).map_err(io::Error::other),
        }
    }

    /// Ends the file.
    pub fn finish(self) -> io::Result<()> {
        match self {
            Self::Csv(mut file) => file.flush(),
            #[cfg(feature = "parquet")]
            Self::Parquet(rows) => rows.finish().map_err(io::Error::other),
        }
    }
}
