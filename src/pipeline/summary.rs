//! What a run did, and the schemas of the files it leaves.

use std::collections::BTreeMap;

use arrow::datatypes::{DataType, Schema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::io::{ManifestLine, RowCounts};

/// What a run did: printed at its end and written to `_right-reset/summary.json`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
pub struct Summary {
    /// Rows by what became of them, parts kept from earlier runs included.
    pub rows: RowCounts,
    /// Documents, tokens and candidates of this run.
    pub documents: DocumentCounts,
    /// Chunks of the documents of this run.
    pub chunks: ChunkCounts,
    /// Parts made, and kept from earlier runs.
    pub parts_made: u64,
    /// Parts kept from earlier runs.
    pub parts_kept: u64,
    /// Data files removed because they are out of date.
    pub parts_removed: u64,
    /// The cut penalty in force, unless counts were fixed.
    pub penalty: Option<f64>,
    /// Scoring.
    pub scoring: ScoringCounts,
    /// Cache records that failed their checksum and were not used.
    pub cache_unsound: u64,
    /// Cache records that were not written (full, or too large).
    pub cache_unwritten: u64,
    /// Seconds of wall time, or of work summed over threads, by stage.
    pub seconds: BTreeMap<String, f64>,
    /// Peak resident memory in bytes, where the system tells.
    pub peak_memory_bytes: Option<u64>,
}

/// Documents, tokens and candidates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub struct DocumentCounts {
    /// Documents whose scores came from the cache.
    pub from_cache: u64,
    /// Documents scored now.
    pub scored: u64,
    /// Documents that no limits could cut, so that no scores were needed.
    pub not_needed: u64,
    /// Tokens of all of them.
    pub tokens: u64,
    /// Candidate edges with a score.
    pub candidates: u64,
    /// Documents for which a limit gave way.
    pub relaxed: u64,
}

/// Chunks and their lengths in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
pub struct ChunkCounts {
    /// Chunks.
    pub count: u64,
    /// Mean.
    pub mean: f64,
    /// 5th percentile.
    pub p5: u32,
    /// Median.
    pub p50: u32,
    /// 95th percentile.
    pub p95: u32,
}

/// Scoring.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
pub struct ScoringCounts {
    /// Whether the model was loaded.
    pub model_loaded: bool,
    /// Whether the tokenizer was loaded.
    pub tokenizer_loaded: bool,
    /// Whether the text encoder was loaded.
    pub encoder_loaded: bool,
    /// Document tokens scored.
    pub source_tokens: u64,
    /// Tokens that went through the network.
    pub forward_tokens: u64,
    /// Document tokens per second of scoring.
    pub tokens_per_second: f64,
}

/// Chunk lengths, counted.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Lengths(BTreeMap<u32, u64>);

impl Lengths {
    pub(super) fn add(&mut self, tokens: u32) {
        *self.0.entry(tokens).or_default() += 1;
    }

    pub(super) fn merge(&mut self, other: &Self) {
        for (&tokens, &count) in &other.0 {
            *self.0.entry(tokens).or_default() += count;
        }
    }

    pub(super) fn counts(&self) -> ChunkCounts {
        let count: u64 = self.0.values().sum();
        let tokens: u64 = self.0.iter().map(|(&t, &c)| u64::from(t) * c).sum();
        // Nearest rank.
        let percentile = |share: f64| {
            let rank = ((share * count as f64).ceil() as u64).max(1);
            let mut seen = 0;
            self.0
                .iter()
                .find(|(_, c)| {
                    seen += **c;
                    seen >= rank
                })
                .map_or(0, |(&t, _)| t)
        };
        let mean = if count == 0 { 0.0 } else { tokens as f64 / count as f64 };
        ChunkCounts { count, mean, p5: percentile(0.05), p50: percentile(0.5), p95: percentile(0.95) }
    }

    /// Chunks of at least or at most so many tokens.
    pub(super) fn within(&self, range: impl std::ops::RangeBounds<u32>) -> u64 {
        self.0.range(range).map(|(_, c)| c).sum()
    }
}

/// Peak resident memory of this process in bytes, where the system tells.
pub(super) fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|l| l.starts_with("VmHWM:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}

/// JSON Schema of `summary.json`.
#[must_use]
pub fn summary_schema() -> serde_json::Value {
    schemars::schema_for!(Summary).to_value()
}

/// JSON Schema of a line of `manifest.jsonl`.
#[must_use]
pub fn manifest_schema() -> serde_json::Value {
    schemars::schema_for!(ManifestLine).to_value()
}

/// The columns of a schema as JSON: name, Arrow type, whether null is possible, and what they mean.
pub(super) fn columns_schema(schema: &Schema, title: &str, meaning: impl Fn(&str) -> &'static str) -> serde_json::Value {
    let columns: Vec<serde_json::Value> = schema
        .fields()
        .iter()
        .map(|f| {
            serde_json::json!({
                "name": f.name(), "type": f.data_type().to_string(), "nullable": f.is_nullable(), "meaning": meaning(f.name()),
            })
        })
        .collect();
    serde_json::json!({ "title": title, "columns": columns })
}

/// The columns of a chunk file, as JSON. Passed-through columns follow them; `doc_id` has the type of the id column.
///
/// # Errors
/// [`crate::io::IoError`] never in practice: the columns are the program's own.
pub fn chunks_schema() -> Result<serde_json::Value, crate::io::IoError> {
    let plan = crate::io::ColumnPlan::of_text("text");
    let schema = super::chunks::chunk_schema(&plan, true, &[], &super::chunks::Judge::Percentile, std::collections::HashMap::new())?;
    debug_assert_eq!(schema.fields().iter().map(|f| f.name().as_str()).collect::<Vec<_>>(), super::chunks::OWN_COLUMNS);
    let meaning = |name: &str| match name {
        "doc_id" => "the id column's value, else input path # physical row",
        "chunk_index" => "number of the chunk within its document, from 0",
        "chunk_count" => "chunks of the document",
        "chunk_id" => "first 32 hex digits of blake3(blake3(text), byte_start, byte_end): stable across runs",
        "text" => "exact slice of the document",
        "byte_start" | "byte_end" => "place in the document, in UTF-8 bytes",
        "char_start" | "char_end" => "place in the document, in Unicode scalar values",
        "token_start" | "token_end" => "place in the document, in tokens of its one tokenization",
        "token_count" => "tokens of the chunk",
        "cut_score" => "score of the chunk's left edge; null on chunk 0 and at fallback edges",
        "cut_utility" => "percentile of that score within the document, in (0, 1]; 0 at fallback edges, null on chunk 0",
        "limits_relaxed" => "whether a length limit gave way in this document",
        "source_file" => "input file, relative to its root",
        "source_row" => "physical row in that file, from 0",
        _ => "",
    };
    let mut value = columns_schema(&schema, "Chunks", meaning);
    if let Some(object) = value.as_object_mut() {
        object.insert(
            "with_several_readouts".into(),
            "a nullable Float32 column cut_<readout> for each, after cut_utility: its own score of the edge".into(),
        );
        object.insert(
            "with_chunk_damage".into(),
            "nullable Float32 columns cut_damage, what the removed prefix knew about the whole chunk, in nats, and cut_damage_per_token, before limits_relaxed".into(),
        );
        object.insert("doc_id_type".into(), format!("as in the input; {} without an id column", DataType::Utf8).into());
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_ranks() {
        let mut lengths = Lengths::default();
        (1..=100).for_each(|t| lengths.add(t));
        let counts = lengths.counts();
        assert_eq!((counts.count, counts.mean, counts.p5, counts.p50, counts.p95), (100, 50.5, 5, 50, 95));
        assert_eq!(Lengths::default().counts(), ChunkCounts::default());
        assert_eq!(lengths.within(..=10), 10);
    }
}
