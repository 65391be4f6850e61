//! The `status` command: how far an output folder is, and the summaries of all ranks joined.

use std::collections::BTreeMap;
use std::path::Path;

use schemars::JsonSchema;
use serde::Serialize;

use super::{RunError, Summary};
use crate::io::{IoError, Lines, Rank, RowCounts, SERVICE_DIR, Standing, at, manifest_path, ranks, service_dir, standing};

/// One rank, or the one process, that works on an output folder.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct Worker {
    /// Its number; none if one process does all the work.
    pub rank: Option<u32>,
    /// How far it is.
    pub standing: Standing,
    /// Parts it has committed.
    pub parts: u64,
    /// Of these, parts whose data file is gone or has another size.
    pub parts_missing: u64,
    /// Rows of its parts.
    pub rows: RowCounts,
    /// Chunks of its parts.
    pub chunks: u64,
}

/// How far an output folder is.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct Status {
    /// Whether all are done: the folder holds `_SUCCESS`.
    pub complete: bool,
    /// How many ranks share the work; none if one process does it all.
    pub world_size: Option<u32>,
    /// Each of them.
    pub workers: Vec<Worker>,
    /// Rows of all parts.
    pub rows: RowCounts,
    /// Chunks of all parts.
    pub chunks: u64,
    /// The summaries of the last complete run of each, added up.
    pub summary: Joined,
}

/// Summaries added up.
#[derive(Debug, Clone, PartialEq, Default, Serialize, JsonSchema)]
pub struct Joined {
    /// Summaries there are.
    pub summaries: u64,
    /// Documents whose scores came from the cache.
    pub from_cache: u64,
    /// Documents scored.
    pub scored: u64,
    /// Documents that needed no scores.
    pub not_needed: u64,
    /// Document tokens scored.
    pub source_tokens: u64,
    /// Tokens that went through the network.
    pub forward_tokens: u64,
    /// Parts made.
    pub parts_made: u64,
    /// Parts kept.
    pub parts_kept: u64,
    /// Seconds by stage.
    pub seconds: BTreeMap<String, f64>,
}

/// Looks at an output folder; changes nothing there.
///
/// # Errors
/// [`RunError`] if it is no output folder, or cannot be read.
pub fn status(output: &Path) -> Result<Status, RunError> {
    if !output.join(SERVICE_DIR).is_dir() {
        return Err(
            IoError::Input(format!("{} is no output folder of right-reset: it has no {SERVICE_DIR} folder", output.display())).into()
        );
    }
    let known = ranks(output)?;
    let world = known.first().map(|r| r.world);
    let all: Vec<Option<Rank>> = match world {
        None => vec![None],
        Some(world) => (0..world).map(|rank| Some(Rank { rank, world })).collect(),
    };
    let (mut workers, mut rows, mut chunks, mut joined) = (Vec::new(), RowCounts::default(), 0, Joined::default());
    for rank in all {
        let mut worker = Worker {
            rank: rank.map(|r| r.rank),
            standing: standing(output, rank)?,
            parts: 0,
            parts_missing: 0,
            rows: RowCounts::default(),
            chunks: 0,
        };
        let manifest = manifest_path(output, rank);
        if manifest.exists() {
            for part in Lines::read(&manifest)?.parts.values() {
                worker.parts += 1;
                worker.parts_missing += u64::from(!part.is_there(output));
                worker.rows.add(&part.rows);
                worker.chunks += part.chunks;
            }
        }
        rows.add(&worker.rows);
        chunks += worker.chunks;
        workers.push(worker);
        let path = service_dir(output, rank).join("summary.json");
        if path.exists() {
            let text = std::fs::read_to_string(&path).map_err(at(&path))?;
            let summary: Summary = serde_json::from_str(&text).map_err(|e| IoError::Format {
                path: path.clone(),
                format: "a summary",
                reason: format!("{e}; the next complete run writes it anew"),
            })?;
            joined.add(&summary);
        }
    }
    Ok(Status { complete: output.join("_SUCCESS").exists(), world_size: world, workers, rows, chunks, summary: joined })
}

impl Joined {
    fn add(&mut self, s: &Summary) {
        self.summaries += 1;
        self.from_cache += s.documents.from_cache;
        self.scored += s.documents.scored;
        self.not_needed += s.documents.not_needed;
        self.source_tokens += s.scoring.source_tokens;
        self.forward_tokens += s.scoring.forward_tokens;
        self.parts_made += s.parts_made;
        self.parts_kept += s.parts_kept;
        for (stage, seconds) in &s.seconds {
            *self.seconds.entry(stage.clone()).or_default() += seconds;
        }
    }
}
