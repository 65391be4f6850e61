//! The `score` command: one row per candidate edge.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use arrow::array::{ArrayRef, Float32Builder, Int32Builder, Int64Builder, ListBuilder, RecordBatch, StringBuilder, UInt32Array};
use arrow::compute::take;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use futures::stream::StreamExt;
use tokio::sync::watch;

use super::documents::{DocState, Need, Scorer};
use super::feed::{Event, FeedOptions, forced_format, open_first};
use super::run::{event_stream, spawn_feed, stopped};
use super::spec::{Compression, OnBadRow, OutputFormat, Pipeline};
use super::summary::columns_schema;
use super::{RunError, Stop};
use crate::io::{ChunkWriter, ColumnPlan, IoError, SinkTarget, SourceBatch, at, discover};
use crate::score::Readout;

/// With several readouts a column of scores for each follows the utility.
fn schema(id: DataType, curves: bool, readouts: &[Readout]) -> SchemaRef {
    let mut fields = vec![
        Field::new("doc_id", id, true),
        Field::new("token", DataType::Int32, false),
        Field::new("byte", DataType::Int64, false),
        Field::new("kind", DataType::Utf8, false),
        Field::new("score", DataType::Float32, true),
        Field::new("utility", DataType::Float32, true),
    ];
    if readouts.len() > 1 {
        fields.extend(readouts.iter().map(|r| Field::new(r.as_str(), DataType::Float32, true)));
    }
    if curves {
        let list = DataType::new_list(DataType::Float32, true);
        let name = |r: &Readout| if readouts.len() > 1 { format!("curve_{}", r.as_str()) } else { "curve".to_owned() };
        fields.extend(readouts.iter().map(|r| Field::new(name(r), list.clone(), true)));
    }
    Arc::new(Schema::new(fields))
}

/// The columns of an edge file, as JSON.
#[must_use]
pub fn edges_schema() -> serde_json::Value {
    columns_schema(&schema(DataType::Utf8, true, &[Readout::Rr]), "Edges", |name| match name {
        "doc_id" => "the id column's value, else input path # physical row",
        "token" => "tokens on the left of the edge",
        "byte" => "bytes on the left of the edge",
        "kind" => "word (nearest to the grid) or sentence",
        "score" => {
            "larger favours a cut; null too near the end of the document; with several readouts their weighted sum of percentiles, and a column for each"
        }
        "utility" => "average-rank percentile of the score within the document, in (0, 1]",
        "curve" => "with --curves: cumulative sums of the readout at s, s + 1, every multiple of 8 and the last token of the window",
        _ => "",
    })
}

/// Scores every document of the pipeline's input and writes one row per candidate edge to `output`, whose extension picks the format.
/// Returns documents and edges written.
///
/// # Errors
/// [`RunError`]; the file is then not there.
pub async fn export_edges(
    pipeline: &Pipeline,
    models: &Path,
    output: &Path,
    curves: bool,
    limit: Option<u64>,
    stop: watch::Receiver<Option<Stop>>,
) -> Result<(u64, u64), RunError> {
    let format = match output.extension().and_then(|e| e.to_str()) {
        Some("parquet") => OutputFormat::Parquet,
        Some("arrow" | "ipc" | "feather") => OutputFormat::Arrow,
        Some("jsonl" | "ndjson") => OutputFormat::Jsonl,
        _ => {
            return Err(IoError::Input(format!("{}: its extension must be parquet, arrow or jsonl", output.display())).into());
        }
    };
    let files = discover(&pipeline.input.paths, forced_format(pipeline), None)?;
    let scorer = Arc::new(Scorer::new(pipeline, models)?);
    let first = open_first(pipeline, &files)?;
    let plan = Arc::clone(first.plan());
    let id = if plan.id.is_some() { plan.schema.field(0).data_type().clone() } else { DataType::Utf8 };
    let readouts: Vec<Readout> = scorer.readouts().collect();
    let schema = schema(id, curves, &readouts);
    let temporary = PathBuf::from(format!("{}.rr-tmp", output.display()));
    let mut writer = ChunkWriter::create(SinkTarget::File(temporary.clone()), &schema, format, Compression::Zstd)?;

    let names: Arc<Vec<String>> = Arc::new(files.iter().map(|f| f.relative.clone()).collect());
    let options = FeedOptions { files, plan: Arc::clone(&plan), kept: Default::default(), rank: None, limit, checksum: false, hash: false };
    let events = spawn_feed(pipeline, options, Some(first), &Arc::new(AtomicU64::new(0)));
    let on_bad = pipeline.input.on_bad_row;
    let (sides, readouts) = (scorer.threads() + 1, Arc::new(readouts));
    let worker = Arc::clone(&scorer);
    let rows = event_stream(events).map(move |event| {
        let (scorer, plan, schema, names) = (Arc::clone(&worker), Arc::clone(&plan), Arc::clone(&schema), Arc::clone(&names));
        let readouts = Arc::clone(&readouts);
        async move {
            match event {
                Event::Rows(file, batch) => {
                    let batch = Arc::new(batch);
                    let states = scorer.resolve(&batch, Need::All).await?;
                    let bad = states.iter().zip(&batch.rows).find_map(|(state, row)| match state {
                        DocState::Bad(reason) => Some((*row, reason.clone())),
                        _ => None,
                    });
                    if let (OnBadRow::Fail, Some((row, reason))) = (on_bad, bad) {
                        return Err(IoError::BadRow { file: names[file].clone(), row, reason }.into());
                    }
                    let documents = states.iter().filter(|s| matches!(s, DocState::Ready(_))).count();
                    edge_rows(&schema, &plan, &batch, &names[file], &states, &readouts, curves).map(|b| Some((b, documents as u64)))
                }
                Event::Failed(error) => Err(error),
                _ => Ok(None),
            }
        }
    });
    let mut rows = Box::pin(rows.buffered(sides));
    let mut documents = 0;
    let stop = stopped(stop);
    tokio::pin!(stop);
    let outcome = loop {
        let item = tokio::select! { biased; reason = &mut stop => break Err(RunError::Stopped(reason)), item = rows.next() => item };
        match item {
            None => break Ok(()),
            Some(Err(error)) => break Err(error),
            Some(Ok(None)) => {}
            Some(Ok(Some((batch, count)))) => {
                documents += count;
                if let Err(error) = tokio::task::block_in_place(|| writer.write(batch, 0)) {
                    break Err(error.into());
                }
            }
        }
    };
    // What was scored is kept whatever happened since.
    let flushed = scorer.store().flush();
    let edges = writer.rows();
    let finished = outcome.and_then(|()| Ok(flushed?)).and_then(|()| Ok(writer.finish()?));
    if let Err(error) = finished {
        // The error at hand matters more than a file left behind.
        let _ = std::fs::remove_file(&temporary);
        return Err(error);
    }
    std::fs::rename(&temporary, output).map_err(at(output))?;
    Ok((documents, edges))
}

fn edge_rows(
    schema: &SchemaRef,
    plan: &ColumnPlan,
    batch: &SourceBatch,
    file: &str,
    states: &[DocState],
    readouts: &[Readout],
    with_curves: bool,
) -> Result<RecordBatch, RunError> {
    let (mut rows, mut ids) = (Vec::new(), StringBuilder::new());
    let (mut tokens, mut bytes, mut kinds) = (Int32Builder::new(), Int64Builder::new(), StringBuilder::new());
    let (mut scores, mut utilities) = (Float32Builder::new(), Float32Builder::new());
    let mut single: Vec<Float32Builder> = readouts.iter().map(|_| Float32Builder::new()).collect();
    let mut lists: Vec<_> = readouts.iter().map(|_| ListBuilder::new(Float32Builder::new())).collect();
    for (row, state) in states.iter().enumerate() {
        let DocState::Ready(document) = state else {
            continue;
        };
        let values = document.scores.as_deref().unwrap_or_default();
        let percent = &document.utilities;
        for (candidate, (i, edge)) in document.edges.iter().enumerate().filter(|(_, e)| e.is_candidate()).enumerate() {
            rows.push(row as u32);
            if plan.id.is_none() {
                ids.append_value(format!("{file}#{}", batch.rows[row]));
            }
            tokens.append_value(edge.token.0 as i32);
            bytes.append_value(edge.byte.0 as i64);
            kinds.append_value(edge.kind.as_str());
            let score = values.get(i).copied().filter(|s| !s.is_nan());
            scores.append_option(score);
            utilities.append_option(score.map(|_| percent[i] as f32));
            for (r, (single, lists)) in single.iter_mut().zip(&mut lists).enumerate() {
                let score = document.by_readout.get(r).and_then(|values| values.get(i)).copied();
                single.append_option(score.filter(|s| !s.is_nan()));
                let curve = document.curves.get(r).map(|of| of.curves.get(candidate)).filter(|c| !c.is_empty());
                lists.append_option(curve.map(|c| c.iter().copied().map(Some)));
            }
        }
    }
    let id: ArrayRef =
        if plan.id.is_some() { take(batch.columns.column(0), &UInt32Array::from(rows), None)? } else { Arc::new(ids.finish()) };
    let mut columns: Vec<ArrayRef> = vec![
        id,
        Arc::new(tokens.finish()),
        Arc::new(bytes.finish()),
        Arc::new(kinds.finish()),
        Arc::new(scores.finish()),
        Arc::new(utilities.finish()),
    ];
    if readouts.len() > 1 {
        columns.extend(single.iter_mut().map(|b| Arc::new(b.finish()) as ArrayRef));
    }
    if with_curves {
        columns.extend(lists.iter_mut().map(|b| Arc::new(b.finish()) as ArrayRef));
    }
    Ok(RecordBatch::try_new(Arc::clone(schema), columns)?)
}
