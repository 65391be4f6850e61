//! From a scored document to its chunks, and from chunks to record batches (design section 5).

use std::sync::Arc;

use arrow::array::{
    ArrayRef, BooleanArray, BooleanBuilder, Float32Builder, Int32Builder, Int64Array, Int64Builder, LargeStringArray, RecordBatch,
    StringBuilder, UInt32Array,
};
use arrow::buffer::OffsetBuffer;
use arrow::compute::take;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};

use super::documents::Scored;
use super::spec::{Objective, Pipeline};
use crate::index::{ByteIdx, TokenIdx};
use crate::io::{ColumnPlan, IoError, SourceBatch, TextCell};
use crate::score::{Damage, Knots, Readout};
use crate::segment::{
    Cut, Limits, SegmentError, Segmentation, fixed_count, fixed_damage, open_count, open_counts, open_damage, open_damages,
};
use crate::text::Edge;

/// Names of the columns that every output has, in order, `source_file` and `source_row` only with provenance. With several readouts a column
/// `cut_<readout>` for each follows `cut_utility`; with chunk damage as the objective, `cut_damage` and `cut_damage_per_token` come next.
pub(super) const OWN_COLUMNS: [&str; 17] = [
    "doc_id",
    "chunk_index",
    "chunk_count",
    "chunk_id",
    "text",
    "byte_start",
    "byte_end",
    "char_start",
    "char_end",
    "token_start",
    "token_end",
    "token_count",
    "cut_score",
    "cut_utility",
    "limits_relaxed",
    "source_file",
    "source_row",
];

/// Rows of a record batch of chunks at most, and bytes of text after which one ends.
const BATCH_ROWS: usize = 16 << 10;
const BATCH_BYTES: usize = 8 << 20;

/// How a document is cut.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Cutting {
    /// As many chunks as pay for themselves, at this cut penalty.
    Open(f64),
    /// Exactly this many chunks.
    Fixed(u32),
}

/// The chunks of one document.
#[derive(Debug, Clone, PartialEq)]
pub struct Chunks {
    /// blake3 of its text.
    pub hash: blake3::Hash,
    /// Its tokens.
    pub tokens: u32,
    /// Chosen edges.
    pub cuts: Vec<Chosen>,
    /// Whether a limit gave way.
    pub relaxed: bool,
}

/// An edge that a document is cut at.
#[derive(Debug, Clone, PartialEq)]
pub struct Chosen {
    /// Tokens on its left.
    pub token: TokenIdx,
    /// Bytes on its left.
    pub byte: ByteIdx,
    /// Score; none of a fallback edge.
    pub score: Option<f32>,
    /// Its percentile; 0 of a fallback edge.
    pub utility: f32,
    /// Damage over the whole chunk, in nats, where that is the objective; none of a fallback edge.
    pub damage: Option<f32>,
    /// Where several readouts are scored, the score by each of them, in the pipeline's order; NaN where there is none.
    pub readouts: Vec<f32>,
}

/// What is maximised.
#[derive(Debug, Clone)]
pub(super) enum Judge {
    Percentile,
    /// Damages are read off curves with these knots.
    Damage(Arc<Knots>),
}

impl Judge {
    pub(super) fn new(pipeline: &Pipeline) -> Self {
        match pipeline.segment.objective {
            Objective::Percentile => Self::Percentile,
            Objective::ChunkDamage => {
                let horizons = pipeline.score.early_stages().into_iter().map(|s| s.horizon).chain([pipeline.score.window()]);
                // Longer chunks are rare.
                let longest = pipeline.segment.max.min(1 << 14);
                Self::Damage(Arc::new(Knots::new(pipeline.score.window(), pipeline.score.skip).with_roots(horizons, longest)))
            }
        }
    }
}

/// The edges a program may cut at, and what it knows of them.
pub(super) struct Prepared<'a> {
    /// Index of each cut into the document's edges.
    index: Vec<usize>,
    cuts: Vec<Cut>,
    tokens: u32,
    /// The curve of each cut.
    damages: Option<Vec<Damage<'a>>>,
}

impl<'a> Prepared<'a> {
    pub(super) fn new(document: &'a Scored, judge: &'a Judge) -> Self {
        let tokens = document.tokens;
        if document.scores.is_none() {
            return Self { index: Vec::new(), cuts: Vec::new(), tokens, damages: None };
        }
        let utility = |i: usize| document.utilities.get(i).copied().unwrap_or(f64::NAN);
        let lr = document.curves.iter().find(|c| c.readout == Readout::Lr);
        // Number of each edge among the candidates.
        let number: Vec<usize> = document
            .edges
            .iter()
            .scan(0, |next, edge| {
                let own = *next;
                *next += usize::from(edge.is_candidate());
                Some(own)
            })
            .collect();
        let scored = |i: usize| match (judge, lr) {
            (Judge::Damage(_), Some(lr)) => !lr.curves.get(number[i]).is_empty(),
            _ => !utility(i).is_nan(),
        };
        let index: Vec<usize> = (0..document.edges.len()).filter(|&i| !document.edges[i].is_candidate() || scored(i)).collect();
        let cut = |&i: &usize| Cut { token: document.edges[i].token.0, utility: document.edges[i].is_candidate().then_some(utility(i)) };
        let damages = match (judge, lr) {
            (Judge::Damage(knots), Some(lr)) => {
                let damage = |&i: &usize| match document.edges[i].is_candidate() {
                    true => knots.read(lr.curves.get(number[i]), lr.reach[number[i]].min(tokens - document.edges[i].token.0)),
                    false => knots.read(&[], 0),
                };
                Some(index.iter().map(damage).collect())
            }
            _ => None,
        };
        Self { cuts: index.iter().map(cut).collect(), index, tokens, damages }
    }

    /// The edges, with the curve of each and the tokens that it was scored for where damages count.
    pub(super) fn edges<'b>(&'b self, document: &'b Scored) -> impl Iterator<Item = (&'b Edge, Option<(&'b [f32], u32)>)> {
        let curve = |i: usize| self.damages.as_ref().map(|damages| damages[i].curve());
        self.index.iter().enumerate().map(move |(i, &edge)| (&document.edges[edge], curve(i)))
    }

    /// Score and utility of each of the edges; none of a fallback edge.
    pub(super) fn values<'b>(&'b self, document: &'b Scored) -> impl Iterator<Item = (Option<f32>, Option<f64>)> + 'b {
        let scores = document.scores.as_deref().unwrap_or_default();
        let score = |edge: usize| scores.get(edge).copied().filter(|s| !s.is_nan());
        let utility = |cut: &Cut| cut.utility.filter(|u| !u.is_nan());
        self.index.iter().zip(&self.cuts).map(move |(&edge, cut)| (score(edge), utility(cut)))
    }

    /// The open-count program at a penalty.
    pub(super) fn open(&self, limits: &Limits, penalty: f64) -> Segmentation {
        match &self.damages {
            None => open_count(&self.cuts, self.tokens, limits, penalty),
            Some(damages) => open_damage(&self.cuts, self.tokens, limits, penalty, |i, lens, out| damages[i].of_each(lens, out)),
        }
    }

    /// The lengths in tokens of the chunks at each penalty, and whether a limit gave way.
    pub(super) fn sweep(&self, limits: &Limits, penalties: &[f64]) -> Vec<(Vec<u32>, bool)> {
        let solved = match &self.damages {
            None => open_counts(&self.cuts, self.tokens, limits, penalties),
            Some(damages) => open_damages(&self.cuts, self.tokens, limits, penalties, |i, lens, out| damages[i].of_each(lens, out)),
        };
        let lengths = |s: &Segmentation| {
            let ends = s.cuts.iter().map(|&c| self.cuts[c].token).chain([self.tokens]);
            ends.scan(0, |start, end| Some(end - std::mem::replace(start, end))).collect()
        };
        solved.iter().map(|s| (lengths(s), s.limits_relaxed())).collect()
    }

    pub(super) fn segment(&self, document: &Scored, limits: &Limits, cutting: Cutting) -> Result<Chunks, SegmentError> {
        let solved = match (cutting, &self.damages) {
            (Cutting::Open(penalty), _) => self.open(limits, penalty),
            (Cutting::Fixed(count), None) => fixed_count(&self.cuts, self.tokens, limits, count)?,
            (Cutting::Fixed(count), Some(damages)) => {
                fixed_damage(&self.cuts, self.tokens, limits, count, |i, lens, out| damages[i].of_each(lens, out))?
            }
        };
        let scores = document.scores.as_deref().unwrap_or_default();
        let ends = solved.cuts.iter().skip(1).map(|&c| self.cuts[c].token).chain([self.tokens]);
        let chosen = |(&c, end): (&usize, u32)| {
            let (edge, utility) = (self.index[c], self.cuts[c].utility);
            Chosen {
                token: document.edges[edge].token,
                byte: document.edges[edge].byte,
                readouts: document.by_readout.iter().map(|scores| scores[edge]).collect(),
                score: utility.and(scores.get(edge).copied()).filter(|s| !s.is_nan()),
                utility: utility.filter(|u| !u.is_nan()).unwrap_or(0.0) as f32,
                damage: self.damages.as_ref().zip(utility).map(|(d, _)| d[c].of(end - self.cuts[c].token) as f32),
            }
        };
        let cuts = solved.cuts.iter().zip(ends).map(chosen).collect();
        Ok(Chunks { hash: document.hash, tokens: document.tokens, cuts, relaxed: solved.limits_relaxed() })
    }
}

impl Chunks {
    /// Tokens of each chunk.
    pub fn lengths(&self) -> impl Iterator<Item = u32> + '_ {
        let ends = self.cuts.iter().map(|c| c.token.0).chain([self.tokens]);
        ends.scan(0, |start, end| Some(end - std::mem::replace(start, end)))
    }
}

/// The output schema for a plan of input columns.
///
/// # Errors
/// [`IoError::Input`] if a passed-through column has the name of an own column or of another.
pub(super) fn chunk_schema(
    plan: &ColumnPlan,
    provenance: bool,
    readouts: &[Readout],
    judge: &Judge,
    metadata: std::collections::HashMap<String, String>,
) -> Result<SchemaRef, IoError> {
    let id = if plan.id.is_some() { plan.schema.field(0).data_type().clone() } else { DataType::Utf8 };
    let mut fields = vec![
        Field::new("doc_id", id, false),
        Field::new("chunk_index", DataType::Int32, false),
        Field::new("chunk_count", DataType::Int32, false),
        Field::new("chunk_id", DataType::Utf8, false),
        Field::new("text", DataType::LargeUtf8, false),
        Field::new("byte_start", DataType::Int64, false),
        Field::new("byte_end", DataType::Int64, false),
        Field::new("char_start", DataType::Int64, false),
        Field::new("char_end", DataType::Int64, false),
        Field::new("token_start", DataType::Int32, false),
        Field::new("token_end", DataType::Int32, false),
        Field::new("token_count", DataType::Int32, false),
        Field::new("cut_score", DataType::Float32, true),
        Field::new("cut_utility", DataType::Float32, true),
    ];
    if readouts.len() > 1 {
        fields.extend(readouts.iter().map(|r| Field::new(format!("cut_{}", r.as_str()), DataType::Float32, true)));
    }
    if let Judge::Damage(_) = judge {
        fields.extend(["cut_damage", "cut_damage_per_token"].map(|name| Field::new(name, DataType::Float32, true)));
    }
    fields.push(Field::new("limits_relaxed", DataType::Boolean, false));
    if provenance {
        fields.push(Field::new("source_file", DataType::Utf8, false));
        fields.push(Field::new("source_row", DataType::Int64, false));
    }
    for field in plan.schema.fields().iter().skip(plan.service) {
        if fields.iter().any(|f| f.name() == field.name()) {
            return Err(IoError::Input(format!(
                "the passed-through column {:?} has the name of an output column; leave it out of input.pass_through or rename it in the input",
                field.name()
            )));
        }
        fields.push(field.as_ref().clone());
    }
    Ok(Arc::new(Schema::new_with_metadata(fields, metadata)))
}

/// Builds the output rows of a batch from its rows that were cut, by their places in it: slices of bounded size with their bytes of text. Texts are not copied:
/// those of a slice follow one another in the batch.
pub(super) fn assemble(
    schema: &SchemaRef,
    plan: &ColumnPlan,
    source: &SourceBatch,
    file: &str,
    documents: &[(usize, Chunks)],
) -> Result<Vec<(RecordBatch, usize)>, arrow::error::ArrowError> {
    let mut out = Vec::new();
    let mut slice = Slice::default();
    // Columns of single readouts.
    let damages = if schema.index_of("cut_damage").is_ok() { 2 } else { 0 };
    let readouts = schema.index_of("limits_relaxed")? - schema.index_of("cut_utility")? - 1 - damages;
    let (_, starts) = source.text_bytes();
    for (row, chunks) in documents {
        let TextCell::Text(text) = source.text(*row) else {
            continue;
        };
        let start = starts[*row];
        if slice.ends.last().is_some_and(|&end| end != start) {
            out.push(std::mem::take(&mut slice).finish(schema, plan, source, file)?);
        }
        let count = chunks.cuts.len() as i32 + 1;
        let (mut byte, mut token, mut chars) = (0_usize, 0_u32, 0_i64);
        for index in 0..count {
            let next = chunks.cuts.get(index as usize);
            let (byte_end, token_end) = next.map_or((text.len(), chunks.tokens), |c| (c.byte.get(), c.token.0));
            let piece = &text[byte..byte_end];
            let char_end = chars + piece.chars().count() as i64;
            let mut name = [0; 48];
            name[..32].copy_from_slice(chunks.hash.as_bytes());
            name[32..40].copy_from_slice(&(byte as u64).to_le_bytes());
            name[40..].copy_from_slice(&(byte_end as u64).to_le_bytes());
            slice.rows.push(*row as u32);
            slice.chunk_index.append_value(index);
            slice.chunk_count.append_value(count);
            slice.chunk_id.append_value(&blake3::hash(&name).to_hex()[..32]);
            if slice.ends.is_empty() {
                slice.ends.push(start + byte as i64);
            }
            slice.ends.push(start + byte_end as i64);
            for (builder, value) in slice.places.iter_mut().zip([byte as i64, byte_end as i64, chars, char_end]) {
                builder.append_value(value);
            }
            for (builder, value) in slice.tokens.iter_mut().zip([token, token_end, token_end - token]) {
                builder.append_value(value as i32);
            }
            let cut = index.checked_sub(1).and_then(|i| chunks.cuts.get(i as usize));
            slice.cut_score.append_option(cut.and_then(|c| c.score));
            slice.cut_utility.append_option(cut.map(|c| c.utility));
            slice.cut_readouts.resize_with(readouts, Float32Builder::default);
            for (i, builder) in slice.cut_readouts.iter_mut().enumerate() {
                builder.append_option(cut.and_then(|c| c.readouts.get(i).copied()).filter(|s| !s.is_nan()));
            }
            slice.cut_damages.resize_with(damages, Float32Builder::default);
            let damage = cut.and_then(|c| c.damage);
            let values = [damage, damage.map(|d| d / (token_end - token) as f32)];
            slice.cut_damages.iter_mut().zip(values).for_each(|(builder, value)| builder.append_option(value));
            slice.relaxed.append_value(chunks.relaxed);
            slice.bytes += piece.len();
            (byte, token, chars) = (byte_end, token_end, char_end);
            if slice.rows.len() == BATCH_ROWS || slice.bytes >= BATCH_BYTES {
                out.push(std::mem::take(&mut slice).finish(schema, plan, source, file)?);
            }
        }
    }
    if !slice.rows.is_empty() {
        out.push(slice.finish(schema, plan, source, file)?);
    }
    Ok(out)
}

#[derive(Default)]
struct Slice {
    rows: Vec<u32>,
    bytes: usize,
    chunk_index: Int32Builder,
    chunk_count: Int32Builder,
    chunk_id: StringBuilder,
    /// Where in the texts of the batch the first chunk begins, and each ends.
    ends: Vec<i64>,
    places: [Int64Builder; 4],
    tokens: [Int32Builder; 3],
    cut_score: Float32Builder,
    cut_utility: Float32Builder,
    cut_readouts: Vec<Float32Builder>,
    cut_damages: Vec<Float32Builder>,
    relaxed: BooleanBuilder,
}

impl Slice {
    fn finish(
        mut self,
        schema: &SchemaRef,
        plan: &ColumnPlan,
        source: &SourceBatch,
        file: &str,
    ) -> Result<(RecordBatch, usize), arrow::error::ArrowError> {
        let numbers = |row: &u32| source.rows[*row as usize] as i64;
        let id: ArrayRef = if plan.id.is_some() {
            take(source.columns.column(0), &UInt32Array::from(self.rows.clone()), None)?
        } else {
            let mut ids = StringBuilder::new();
            self.rows.iter().for_each(|row| ids.append_value(format!("{file}#{}", numbers(row))));
            Arc::new(ids.finish())
        };
        let first = self.ends.first().copied().unwrap_or_default();
        let texts = source.text_bytes().0.slice_with_length(first as usize, self.bytes);
        let ends = self.ends.iter().map(|end| end - first).collect::<Vec<_>>();
        let mut columns: Vec<ArrayRef> = vec![
            id,
            Arc::new(self.chunk_index.finish()),
            Arc::new(self.chunk_count.finish()),
            Arc::new(self.chunk_id.finish()),
            Arc::new(LargeStringArray::try_new(OffsetBuffer::new(ends.into()), texts, None)?),
        ];
        columns.extend(self.places.iter_mut().map(|b| Arc::new(b.finish()) as ArrayRef));
        columns.extend(self.tokens.iter_mut().map(|b| Arc::new(b.finish()) as ArrayRef));
        let relaxed: BooleanArray = self.relaxed.finish();
        columns.extend([Arc::new(self.cut_score.finish()) as ArrayRef, Arc::new(self.cut_utility.finish())]);
        columns.extend(self.cut_readouts.iter_mut().map(|b| Arc::new(b.finish()) as ArrayRef));
        columns.extend(self.cut_damages.iter_mut().map(|b| Arc::new(b.finish()) as ArrayRef));
        columns.push(Arc::new(relaxed));
        let passed = plan.schema.fields().len() - plan.service;
        if schema.fields().len() - passed > columns.len() {
            let mut files = StringBuilder::new();
            self.rows.iter().for_each(|_| files.append_value(file));
            columns.push(Arc::new(files.finish()));
            columns.push(Arc::new(self.rows.iter().map(numbers).collect::<Int64Array>()));
        }
        let rows = UInt32Array::from(self.rows);
        for column in source.columns.columns().iter().skip(plan.service) {
            columns.push(take(column, &rows, None)?);
        }
        Ok((RecordBatch::try_new(Arc::clone(schema), columns)?, self.bytes))
    }
}
