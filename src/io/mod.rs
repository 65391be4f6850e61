//! Input and output: sources of documents, sinks of chunks, and the commit protocol of an output folder.
//!
//! Promises: a row is read, counted and named by its physical number; a data file is complete or absent; memory is bounded by settings.
//! Knows nothing of text, models or scores.

mod convert;
mod discover;
mod manifest;
mod readers;
mod sink;

pub(crate) use convert::ColumnSettings;
pub use convert::{ColumnPlan, SourceBatch, TextCell};
pub use discover::{FileFormat, InputFile, discover};
pub(crate) use manifest::Line as ManifestLine;
pub use manifest::{
    CalibrationLine, InputState, KeptParts, Lines, Manifest, PartLine, Rank, RowCounts, RunLine, SERVICE_DIR, SpeedLine, Standing, Unit,
    Why, WhyKept, WhyRemoved, file_state, hash_file, manifest_path, ranks, service_dir, standing, write_whole,
};
pub use readers::{Limits as ReadLimits, SourceReader, units};
pub use sink::{ChunkWriter, SinkTarget};

use std::path::PathBuf;

/// What can go wrong with files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IoError {
    /// Reading or writing failed.
    #[error("{path}: {source}{}", advice(.source))]
    File {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file is not what its format says.
    #[error("{path}: not readable as {format}: {reason}")]
    Format {
        /// The file.
        path: PathBuf,
        /// The format.
        format: &'static str,
        /// Why.
        reason: String,
    },
    /// A file lacks a column, or has it in a type that cannot be used.
    #[error("{path}: column {column:?} {reason}")]
    Column {
        /// The file.
        path: PathBuf,
        /// The column.
        column: String,
        /// What is wrong.
        reason: String,
    },
    /// A bad row, under the policy `fail`.
    #[error("{file}, row {row}: {reason}; to go on without such rows set input.on_bad_row to \"skip\" or \"quarantine\"")]
    BadRow {
        /// The file.
        file: String,
        /// Physical row, from 0.
        row: u64,
        /// What is wrong.
        reason: String,
    },
    /// The inputs cannot be used as given.
    #[error("{0}")]
    Input(String),
}

/// What to do about an I/O error, where that can be told.
fn advice(error: &std::io::Error) -> &'static str {
    use std::io::ErrorKind::{FileTooLarge, PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    match error.kind() {
        StorageFull | QuotaExceeded | FileTooLarge => "; make room there and run the same command again: what is done is kept",
        PermissionDenied | ReadOnlyFilesystem => "; mend the permissions there, or choose another place",
        _ => "",
    }
}

/// Turns an I/O error of `path` into an [`IoError`].
pub(crate) fn at(path: &std::path::Path) -> impl FnOnce(std::io::Error) -> IoError + '_ {
    move |source| IoError::File { path: path.to_owned(), source }
}
