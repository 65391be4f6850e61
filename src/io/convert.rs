//! From record batches of any schema to the columns a run needs, in types that hold for all its files.

use std::collections::BTreeMap;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, LargeStringArray, RecordBatch, RecordBatchOptions, new_null_array};
use arrow::buffer::{Buffer, NullBuffer};
use arrow::compute::{CastOptions, cast_with_options};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};

use super::IoError;

/// The text of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextCell<'a> {
    /// A text.
    Text(&'a str),
    /// Null, or a JSONL line without the key.
    Null,
    /// A row that cannot be used, and why.
    Bad(&'a str),
}

/// Consecutive rows of one file.
#[derive(Debug, Clone)]
pub struct SourceBatch {
    /// Physical row numbers.
    pub rows: Vec<u64>,
    /// Their texts; those of bad rows mean nothing.
    pub(super) texts: LargeStringArray,
    /// Rows that cannot be used, by their place in the batch, and why.
    pub(super) bad: BTreeMap<usize, String>,
    /// Id, count and pass-through columns of the rows, in the plan's types.
    pub columns: RecordBatch,
}

impl SourceBatch {
    /// The text of the row at a place of the batch.
    #[must_use]
    pub fn text(&self, place: usize) -> TextCell<'_> {
        match self.bad.get(&place) {
            Some(reason) => TextCell::Bad(reason),
            None if self.texts.is_null(place) => TextCell::Null,
            None => TextCell::Text(self.texts.value(place)),
        }
    }

    /// The texts of all rows.
    pub fn texts(&self) -> impl ExactSizeIterator<Item = TextCell<'_>> {
        (0..self.rows.len()).map(|place| self.text(place))
    }

    /// All texts in one piece, and where in it each begins and the last one ends.
    pub(crate) fn text_bytes(&self) -> (&Buffer, &[i64]) {
        (self.texts.values(), self.texts.value_offsets())
    }

    /// Makes null of every text but some.
    pub(crate) fn keep_texts(&mut self, mut keep: impl FnMut(TextCell<'_>) -> bool) {
        let nulls: NullBuffer = self.texts().map(|text| matches!(text, TextCell::Text(_)) && keep(text)).collect::<Vec<_>>().into();
        let (offsets, values, _) = self.texts.clone().into_parts();
        // The same texts with as many nulls as there are rows.
        if let Ok(texts) = LargeStringArray::try_new(offsets, values, Some(nulls)) {
            self.texts = texts;
        }
    }

    /// Splits off the first `rows` rows; the rest stays.
    #[must_use]
    pub fn split_front(&mut self, rows: usize) -> Self {
        let rest = self.rows.split_off(rows);
        let texts = self.texts.slice(rows, self.texts.len() - rows);
        let bad = self.bad.split_off(&rows).into_iter().map(|(place, why)| (place - rows, why)).collect();
        let columns = self.columns.slice(0, rows);
        self.columns = self.columns.slice(rows, self.columns.num_rows() - rows);
        let front = self.texts.slice(0, rows);
        self.texts = texts;
        Self { rows: std::mem::replace(&mut self.rows, rest), texts: front, bad: std::mem::replace(&mut self.bad, bad), columns }
    }
}

/// Which columns are read and in which types they leave: fixed by the first file.
#[derive(Debug, Clone)]
pub struct ColumnPlan {
    /// The text column.
    pub text: String,
    /// The id column.
    pub id: Option<String>,
    /// A column of chunk counts.
    pub count: Option<String>,
    /// The columns beside the text: the id first, then the count, if any, then what is passed through.
    pub schema: SchemaRef,
    /// How many of the columns are not passed through.
    pub service: usize,
    /// Names in `input.columns`, for JSONL.
    pub(super) typed: BTreeMap<String, DataType>,
}

/// What a pipeline says about columns.
pub(crate) struct ColumnSettings<'a> {
    pub(crate) text: &'a str,
    pub(crate) id: Option<&'a str>,
    pub(crate) count: Option<&'a str>,
    /// `None` is all.
    pub(crate) pass_through: Option<&'a [String]>,
    pub(crate) columns: &'a BTreeMap<String, String>,
}

impl ColumnPlan {
    /// Plans for a file of a known schema (Parquet, Arrow) or for JSONL (`None`).
    pub(crate) fn new(settings: &ColumnSettings<'_>, schema: Option<&Schema>, path: &Path) -> Result<Self, IoError> {
        let fail = |column: &str, reason: String| IoError::Column { path: path.to_owned(), column: column.to_owned(), reason };
        let mut typed = BTreeMap::new();
        for (name, word) in settings.columns {
            let kind = type_of_word(word)
                .ok_or_else(|| IoError::Input(format!("input.columns: {name} = {word:?} is no Arrow type; use string, bool, int32, int64, float32, float64 or Arrow's own notation such as \"List(Int64)\"")))?;
            typed.insert(name.clone(), kind);
        }
        let of = |name: &str| -> Result<DataType, IoError> {
            match schema {
                Some(schema) => {
                    let field = schema.field_with_name(name).map_err(|_| {
                        let names: Vec<&str> = schema.fields().iter().map(|f| f.name().as_str()).collect();
                        fail(name, format!("is missing; the file has {}", names.join(", ")))
                    })?;
                    Ok(plain(field.data_type()))
                }
                None => Ok(typed.get(name).cloned().unwrap_or(DataType::Utf8)),
            }
        };
        if let Some(schema) = schema {
            let kind = of(settings.text)?;
            if !matches!(kind, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View | DataType::Null) {
                return Err(fail(settings.text, format!("holds {kind}, not text; name the text column with input.text_column")));
            }
            let names: Vec<&String> = schema.fields().iter().map(|f| f.name()).collect();
            if let Some(twice) = names.iter().enumerate().find(|(i, n)| names[..*i].contains(n)).map(|(_, n)| n) {
                return Err(fail(twice, "occurs twice".into()));
            }
        }
        let mut fields = Vec::new();
        if let Some(id) = settings.id {
            fields.push(Field::new(id, of(id)?, true));
        }
        if let Some(count) = settings.count {
            let kind = if schema.is_some() { of(count)? } else { DataType::Int64 };
            if !kind.is_integer() {
                return Err(fail(count, format!("holds {kind}; segment.count_column needs integers")));
            }
            fields.push(Field::new(count, DataType::Int64, true));
        }
        let service = fields.len();
        let taken = |name: &str| name == settings.text || Some(name) == settings.id;
        let names: Vec<String> = match (settings.pass_through, schema) {
            (Some(list), _) => list.to_vec(),
            (None, Some(schema)) => schema.fields().iter().map(|f| f.name().clone()).filter(|n| !taken(n)).collect(),
            (None, None) => typed.keys().filter(|n| !taken(n)).cloned().collect(),
        };
        for name in &names {
            fields.push(Field::new(name, of(name)?, true));
        }
        Ok(Self {
            text: settings.text.to_owned(),
            id: settings.id.map(str::to_owned),
            count: settings.count.map(str::to_owned),
            schema: Arc::new(Schema::new(fields)),
            service,
            typed,
        })
    }

    /// A plan with a text column only.
    #[must_use]
    pub fn of_text(text: &str) -> Self {
        let schema = Arc::new(Schema::empty());
        Self { text: text.to_owned(), id: None, count: None, schema, service: 0, typed: BTreeMap::new() }
    }

    /// Whether a column is read.
    pub(super) fn wants(&self, name: &str) -> bool {
        name == self.text || self.schema.fields().iter().any(|f| f.name() == name)
    }

    /// Takes the plan's columns out of a batch.
    pub(crate) fn convert(&self, batch: &RecordBatch, first_row: u64, max_document: u64, path: &Path) -> Result<SourceBatch, IoError> {
        let column = |name: &str| -> Result<&ArrayRef, IoError> {
            batch.column_by_name(name).ok_or_else(|| IoError::Column {
                path: path.to_owned(),
                column: name.to_owned(),
                reason: "is missing, though the first file has it".into(),
            })
        };
        let texts = cast(column(&self.text)?, &DataType::LargeUtf8, &self.text, path)?;
        let texts = texts.as_string::<i64>().clone();
        let bad =
            (0..texts.len()).filter(|&i| !texts.is_null(i)).filter_map(|i| Some((i, too_long(texts.value(i), max_document)?))).collect();
        let columns = self.schema.fields().iter().map(|f| cast(column(f.name())?, f.data_type(), f.name(), path));
        let columns = columns.collect::<Result<Vec<_>, _>>()?;
        let rows = batch.num_rows();
        Ok(SourceBatch {
            rows: (first_row..first_row + rows as u64).collect(),
            texts,
            bad,
            columns: assemble(&self.schema, columns, rows, path)?,
        })
    }
}

/// A record batch that may have no columns.
pub(super) fn assemble(schema: &SchemaRef, columns: Vec<ArrayRef>, rows: usize, path: &Path) -> Result<RecordBatch, IoError> {
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    RecordBatch::try_new_with_options(Arc::clone(schema), columns, &options).map_err(|e| IoError::Format {
        path: path.to_owned(),
        format: "record batches",
        reason: e.to_string(),
    })
}

/// Why a text is a bad row, if it is too long.
pub(super) fn too_long(text: &str, max: u64) -> Option<String> {
    (text.len() as u64 > max).then(|| format!("its text has {} bytes, more than input.max_document_bytes = {max}", text.len()))
}

/// The type a column leaves in: dictionaries are decoded.
fn plain(kind: &DataType) -> DataType {
    if let DataType::Dictionary(_, value) = kind { plain(value) } else { kind.clone() }
}

/// Casts without loss: a value that does not fit is an error, not a null.
fn cast(array: &ArrayRef, to: &DataType, name: &str, path: &Path) -> Result<ArrayRef, IoError> {
    if array.data_type() == to {
        return Ok(Arc::clone(array));
    }
    if array.data_type() == &DataType::Null {
        return Ok(new_null_array(to, array.len()));
    }
    let fail = |reason: String| IoError::Column { path: path.to_owned(), column: name.to_owned(), reason };
    let lossless = match (array.data_type(), to) {
        (from, to) if from.is_floating() && to.is_integer() => false,
        (DataType::Float64, DataType::Float32 | DataType::Float16) => false,
        (from, to) if from.is_integer() && to.is_floating() => false,
        _ => true,
    };
    if !lossless {
        return Err(fail(format!("is {} here but {to} in the first file, and cannot be cast without loss", array.data_type())));
    }
    let options = CastOptions { safe: false, ..CastOptions::default() };
    cast_with_options(array, to, &options).map_err(|e| fail(format!("is {} here but {to} in the first file: {e}", array.data_type())))
}

fn type_of_word(word: &str) -> Option<DataType> {
    Some(match word.to_ascii_lowercase().as_str() {
        "string" | "utf8" | "str" => DataType::Utf8,
        "bool" | "boolean" => DataType::Boolean,
        "int32" => DataType::Int32,
        "int64" | "int" => DataType::Int64,
        "float32" => DataType::Float32,
        "float64" | "float" | "double" => DataType::Float64,
        _ => DataType::from_str(word).ok()?,
    })
}
