//! The heart of every command: batches of rows in, cut documents out, in order and side by side.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::{Int64Type, Schema, SchemaRef};
use futures::stream::{Stream, StreamExt};

use super::chunks::{Cutting, Judge, Prepared, assemble, chunk_schema};
use super::documents::{DocState, Need, Scored, Scorer};
use super::feed::Columns;
use super::spec::{OnBadRow, Pipeline};
use super::summary::Lengths;
use super::{Chunks, RunError};
use crate::io::{ColumnPlan, IoError, RowCounts, SourceBatch};
use crate::segment::Limits;

/// The cut of every batch: chunks as record batches, and what became of the rows.
pub(super) struct CutBatch {
    /// Record batches of chunks with their bytes of text.
    pub(super) chunks: Vec<(RecordBatch, usize)>,
    pub(super) rows: RowCounts,
    pub(super) lengths: Lengths,
    pub(super) relaxed: u64,
    /// Bad rows and why.
    pub(super) bad: Vec<(u64, String)>,
}

/// What became of a row.
enum Outcome {
    Null,
    Empty,
    NotCached,
    Bad(String),
    Cut(Chunks),
}

/// Cuts documents: a stream of record batches in, a stream of record batches of chunks out. Usable without the command line.
///
/// Rows keep their order. Runs on a tokio runtime.
pub struct Operator {
    pub(super) scorer: Arc<Scorer>,
    pub(super) limits: Limits,
    pub(super) cutting: Cutting,
    pub(super) plan: Arc<ColumnPlan>,
    judge: Judge,
    pub(super) schema: SchemaRef,
    on_bad_row: OnBadRow,
    max_document: u64,
    pub(super) segment_ns: AtomicU64,
}

impl Operator {
    /// An operator for batches of the given schema. `scorer` holds the model and the cache; `pipeline` the rest.
    ///
    /// # Errors
    /// [`RunError`] if the schema lacks a column of the pipeline, or if the pipeline asks for `target_mean_tokens`, which needs all
    /// documents before the first.
    pub fn new(pipeline: &Pipeline, scorer: Arc<Scorer>, schema: &Schema) -> Result<Self, RunError> {
        if pipeline.segment.target_mean_tokens.is_some() {
            return Err(IoError::Input("segment.target_mean_tokens needs all documents first; give the operator a penalty".into()).into());
        }
        let columns = Columns::new(pipeline);
        let plan = Arc::new(ColumnPlan::new(&columns.settings(), Some(schema), std::path::Path::new("(record batches)"))?);
        Self::with_plan(pipeline, scorer, plan, pipeline.segment.penalty())
    }

    pub(super) fn with_plan(pipeline: &Pipeline, scorer: Arc<Scorer>, plan: Arc<ColumnPlan>, penalty: f64) -> Result<Self, RunError> {
        let limits = limits(pipeline);
        let segment = &pipeline.segment;
        let words = serde_json::json!({
            "objective": segment.objective, "penalty": penalty, "count": segment.count, "count_column": segment.count_column,
            "target": segment.target, "min": segment.min, "max": segment.max, "length_weight": segment.length_weight(), "utility": segment.utility,
        });
        let metadata: HashMap<String, String> = [
            ("right_reset.model", scorer.model_name().to_owned()),
            ("right_reset.weights", scorer.identity().weights_hash.clone()),
            ("right_reset.tokenizer", scorer.identity().tokenizer_hash.clone()),
            ("right_reset.score", scorer.score_words()),
            ("right_reset.segment", words.to_string()),
        ]
        .map(|(k, v)| (k.to_owned(), v))
        .into();
        let readouts: Vec<_> = scorer.readouts().collect();
        let judge = Judge::new(pipeline);
        let schema = chunk_schema(&plan, pipeline.output.provenance, &readouts, &judge, metadata)?;
        Ok(Self {
            scorer,
            limits,
            judge,
            cutting: segment.count.map_or(Cutting::Open(penalty), Cutting::Fixed),
            plan,
            schema,
            on_bad_row: pipeline.input.on_bad_row,
            max_document: pipeline.input.max_document_bytes,
            segment_ns: AtomicU64::new(0),
        })
    }

    /// The schema of the chunks.
    #[must_use]
    pub fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// Cuts a stream of batches. `name` stands for the file in generated ids and provenance. Bad rows follow the pipeline's policy, but
    /// for a quarantine file, which only a run with an output folder has.
    pub fn run<S>(self: Arc<Self>, name: String, input: S) -> impl Stream<Item = Result<RecordBatch, RunError>>
    where
        S: Stream<Item = Result<RecordBatch, RunError>>,
    {
        let name: Arc<str> = name.into();
        let sides = self.scorer.threads() + 1;
        let mut row = 0;
        let cut = input.map(move |batch| {
            let (this, name) = (Arc::clone(&self), Arc::clone(&name));
            let first = row;
            row += batch.as_ref().map_or(0, |b| b.num_rows() as u64);
            async move {
                let source = this.plan.convert(&batch?, first, this.max_document, std::path::Path::new(&*name))?;
                let cut = this.cut(&name, Arc::new(source)).await?;
                Ok::<_, RunError>(cut.chunks.into_iter().map(|(b, _)| b).collect::<Vec<_>>())
            }
        });
        cut.buffered(sides).flat_map(|batches| {
            let items: Vec<Result<RecordBatch, RunError>> = match batches {
                Ok(batches) => batches.into_iter().map(Ok).collect(),
                Err(error) => vec![Err(error)],
            };
            futures::stream::iter(items)
        })
    }

    /// Resolves and cuts one batch of the file called `name`.
    pub(super) async fn cut(self: &Arc<Self>, name: &str, batch: Arc<SourceBatch>) -> Result<CutBatch, RunError> {
        let need = match (self.plan.count.is_some(), self.cutting) {
            (true, _) => Need::All,
            (false, Cutting::Fixed(count)) if count > 1 => Need::All,
            _ => Need::Cuttable(self.limits),
        };
        let (this, rows) = (Arc::clone(self), Arc::clone(&batch));
        let cut = move |row, state| {
            let began = Instant::now();
            let outcome = this.outcome(&rows, row, state);
            this.segment_ns.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
            outcome
        };
        let (this, rows, name) = (Arc::clone(self), Arc::clone(&batch), name.to_owned());
        self.scorer.resolve_each(&batch, need, cut, move |outcomes| this.gather(&name, &rows, outcomes)).await?
    }

    fn outcome(&self, batch: &SourceBatch, row: usize, state: DocState) -> Outcome {
        match state {
            DocState::Null => Outcome::Null,
            DocState::Empty => Outcome::Empty,
            DocState::NotCached => Outcome::NotCached,
            DocState::Bad(reason) => Outcome::Bad(reason),
            DocState::Ready(_) if self.plan.id.is_some() && batch.columns.column(0).is_null(row) => Outcome::Bad("its id is null".into()),
            DocState::Ready(document) => self.cut_document(&document, batch, row).map_or_else(Outcome::Bad, Outcome::Cut),
        }
    }

    fn gather(&self, name: &str, batch: &SourceBatch, outcomes: Vec<Outcome>) -> Result<CutBatch, RunError> {
        let began = Instant::now();
        let mut rows = RowCounts { read: outcomes.len() as u64, ..RowCounts::default() };
        let (mut lengths, mut relaxed, mut bad) = (Lengths::default(), 0, Vec::new());
        let mut cut: Vec<(usize, Chunks)> = Vec::with_capacity(outcomes.len());
        for (row, outcome) in outcomes.into_iter().enumerate() {
            match outcome {
                Outcome::Null => rows.null += 1,
                Outcome::Empty => rows.empty += 1,
                Outcome::NotCached => rows.not_cached += 1,
                Outcome::Bad(reason) => {
                    rows.bad += 1;
                    bad.push((batch.rows[row], reason));
                }
                Outcome::Cut(chunks) => {
                    rows.chunked += 1;
                    relaxed += u64::from(chunks.relaxed);
                    chunks.lengths().for_each(|tokens| lengths.add(tokens));
                    cut.push((row, chunks));
                }
            }
        }
        if let (OnBadRow::Fail, Some((row, reason))) = (self.on_bad_row, bad.first()) {
            return Err(IoError::BadRow { file: name.to_owned(), row: *row, reason: reason.clone() }.into());
        }
        let chunks = assemble(&self.schema, &self.plan, batch, name, &cut)?;
        self.segment_ns.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        Ok(CutBatch { chunks, rows, lengths, relaxed, bad })
    }

    pub(super) fn cut_document(&self, document: &Scored, batch: &SourceBatch, row: usize) -> Result<Chunks, String> {
        let cutting = if self.plan.count.is_some() {
            let counts = batch.columns.column(usize::from(self.plan.id.is_some())).as_primitive::<Int64Type>();
            if counts.is_null(row) {
                return Err("its chunk count is null".into());
            }
            let count = counts.value(row);
            Cutting::Fixed(u32::try_from(count).ok().filter(|c| *c > 0).ok_or_else(|| format!("its chunk count is {count}"))?)
        } else {
            self.cutting
        };
        Prepared::new(document, &self.judge).segment(document, &self.limits, cutting).map_err(|e| e.to_string())
    }
}

/// The limits of a pipeline.
pub(super) fn limits(pipeline: &Pipeline) -> Limits {
    let s = &pipeline.segment;
    Limits { target: s.target, min: s.min, max: s.max, length_weight: s.length_weight() }
}
