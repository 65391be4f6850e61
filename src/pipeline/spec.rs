//! The pipeline file: every key, its default, and what may stand there (design section 4).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model::ops::Device;
use crate::score::{Readout, Stage};
use crate::segment::{NATS, PERCENTILES, Scale};

/// A pipeline is at fault.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpecError {
    /// A file could not be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The text is no TOML.
    #[error("{origin}: {reason}")]
    Syntax {
        /// Where it came from.
        origin: String,
        /// What the parser says.
        reason: String,
    },
    /// A key or value is wrong.
    #[error("{key}: {reason}")]
    Value {
        /// The key, dotted.
        key: String,
        /// What is wrong, and what may stand there.
        reason: String,
    },
}

/// A pipeline: what comes in, how it is scored and cut, what goes out.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Pipeline {
    /// What keys of `score`, `edges` and `segment` that are not given mean. None is `standard`, but `paper` where the pipeline sets scores or their use up by
    /// hand: by `readouts`, `layer`, `window` or `stages` of `score`, by `objective` or `utility` of `segment`, or by a `segment.penalty` of at most 1, which
    /// is a percentile's.
    pub preset: Option<Preset>,
    /// Where documents come from.
    pub input: Input,
    /// The language model.
    pub model: Model,
    /// How edges are scored.
    pub score: Score,
    /// Which edges are candidates.
    pub edges: EdgesTable,
    /// How scores become chunks.
    pub segment: Segment,
    /// The score cache.
    pub cache: Cache,
    /// Where chunks go.
    pub output: Output,
    /// What `calibrate` found for methods that are compared; `eval` reads it.
    pub eval: Eval,
}

/// The `[eval]` table. It changes nothing of a run.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Eval {
    /// By the method's name.
    pub methods: BTreeMap<String, MethodSettings>,
}

/// How a method that is compared cuts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MethodSettings {
    /// The cut penalty, in the units of its objective.
    pub penalty: f64,
    /// Of a sum of percentiles, the weight of each readout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub utility: Option<BTreeMap<String, f64>>,
}

/// A way to score and cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Preset {
    /// Chunk damage by likelihood ratios, a reset beginning as a document does, at sentence ends and every 32 tokens; all run 16 tokens, the best
    /// half 48, the best 30 % 96, the best fifth 256.
    Standard,
    /// The same with 256 tokens for all.
    Thorough,
    /// The paper's: Right Reset over 24 tokens at 75 % of the depth, nothing before them, at sentence ends and every 8 tokens, by percentiles.
    Paper,
}

impl Preset {
    /// Its settings, as a pipeline would give them.
    fn table(self) -> &'static str {
        match self {
            Self::Standard => {
                "edges.grid = 32\nsegment.objective = \"chunk_damage\"\n[score]\nreadouts = [\"lr\"]\nreset_prefix = \"document\"\nstages = [[16, 0.5], [48, 0.3], [96, 0.2], [256]]"
            }
            Self::Thorough => {
                "edges.grid = 32\nsegment.objective = \"chunk_damage\"\n[score]\nreadouts = [\"lr\"]\nreset_prefix = \"document\"\nwindow = 256"
            }
            Self::Paper => {
                "edges.grid = 8\nsegment.objective = \"percentile\"\n[score]\nreadouts = [\"rr\"]\nreset_prefix = \"none\"\nwindow = 24"
            }
        }
    }

    /// A pipeline of nothing but the preset.
    #[must_use]
    pub fn pipeline(self) -> Pipeline {
        let table = self.table().parse::<toml::Table>().ok().and_then(|table| table.try_into().ok());
        Pipeline { preset: Some(self), ..table.unwrap_or_default() }
    }

    /// The preset of a pipeline's table.
    fn of(table: &toml::Table) -> Result<Self, SpecError> {
        if let Some(word) = table.get("preset") {
            return word
                .clone()
                .try_into()
                .map_err(|e: toml::de::Error| SpecError::Value { key: "preset".into(), reason: with_nearest(e.message()) });
        }
        let get = |section: &str, key: &str| table.get(section).and_then(|t| t.get(key));
        let scores = ["readouts", "layer", "window", "stages"].iter().any(|key| get("score", key).is_some());
        let cuts = ["objective", "utility"].iter().any(|key| get("segment", key).is_some());
        let number = |value: &toml::Value| value.as_float().or_else(|| value.as_integer().map(|v| v as f64));
        let percentile = get("segment", "penalty").and_then(number).is_some_and(|penalty| penalty <= 1.0);
        Ok(if scores || cuts || percentile { Self::Paper } else { Self::Standard })
    }
}

/// The `[input]` table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Input {
    /// Files, folders or globs; `-` is standard input. Relative to the pipeline file. Names in folders that begin with `_` or `.` are skipped.
    pub paths: Vec<String>,
    /// File format; `auto` goes by the name, for standard input by the content.
    pub format: InputFormat,
    /// Column that holds the text.
    pub text_column: String,
    /// Column that identifies a document; without one it is `<path>#<row>`.
    pub id_column: Option<String>,
    /// Columns copied to every chunk: a list of names, "all" or "none".
    pub pass_through: PassThrough,
    /// Arrow types of JSONL columns that are passed through, such as `{ year = "int64" }`; the others become JSON text.
    pub columns: BTreeMap<String, String>,
    /// What becomes of a row that cannot be used.
    pub on_bad_row: OnBadRow,
    /// Bad rows after which the run stops although it may skip them; none is no limit.
    pub max_bad_rows: Option<u64>,
    /// Bytes of text above which a document is a bad row.
    pub max_document_bytes: u64,
    /// Bytes of a JSONL line above which it is a bad row.
    pub max_line_bytes: u64,
}

impl Default for Input {
    fn default() -> Self {
        Self {
            paths: Vec::new(),
            format: InputFormat::Auto,
            text_column: "text".into(),
            id_column: None,
            pass_through: PassThrough::default(),
            columns: BTreeMap::new(),
            on_bad_row: OnBadRow::Fail,
            max_bad_rows: None,
            max_document_bytes: 256 << 20,
            max_line_bytes: 512 << 20,
        }
    }
}

/// Format of the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum InputFormat {
    /// By file name or content.
    Auto,
    /// Apache Parquet.
    Parquet,
    /// JSON lines, plain, gzip or zstd.
    Jsonl,
    /// Arrow IPC, file or stream.
    Arrow,
}

/// Columns that are copied to every chunk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum PassThrough {
    /// "all" or "none".
    Word(PassThroughWord),
    /// These columns.
    Columns(Vec<String>),
}

impl Default for PassThrough {
    fn default() -> Self {
        Self::Word(PassThroughWord::None)
    }
}

/// All columns or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PassThroughWord {
    /// Every column but text and id (Parquet, Arrow; for JSONL those of `input.columns`).
    All,
    /// None.
    None,
}

/// Policy for bad rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnBadRow {
    /// Stop with an error that names the row.
    Fail,
    /// Leave it out and count it.
    Skip,
    /// Leave it out, count it, and write it to `_right-reset/quarantine.jsonl`.
    Quarantine,
}

/// The `[model]` table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Model {
    /// A built-in name, a GGUF file, a hub directory, or `org/name[@revision]` of the Hugging Face hub once it is fetched. A path is relative to the pipeline
    /// file.
    pub name: String,
    /// Precision of inference; `auto` is f32 on every machine.
    pub precision: Precision,
    /// Where products run: `cpu`, `cuda:N` (built with the cargo feature `cuda`) or `metal` (feature `metal`).
    pub device: String,
    /// Put the beginning-of-sequence token before the full pass, for models that need it.
    pub bos: bool,
    /// Inference threads; none is one per available processor.
    pub threads: Option<u32>,
}

impl Default for Model {
    fn default() -> Self {
        Self { name: "smollm2-135m".into(), precision: Precision::Auto, device: "cpu".into(), bos: false, threads: None }
    }
}

/// Precision of inference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// f32.
    Auto,
    /// 32-bit floats, the reference.
    F32,
    /// Weights and inputs of products rounded to 16 bits (bf16), sums in f32.
    Bf16,
    /// As `bf16`, but for the first layers of feed-forward ones and the output head, half of all operations: those multiply 8-bit integers.
    Int8,
}

/// The `[score]` table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Score {
    /// Readouts of the reset pass, from one pass all together. The first is the utility unless `segment.utility` says otherwise.
    pub readouts: Vec<ReadoutWord>,
    /// The encoder of the readout `embed`: `minilm-l6`, a hub directory of a BERT-type sentence encoder, or `org/name[@revision]` of the hub once it is fetched.
    pub encoder: String,
    /// Where RR reads states: a block number, a share such as "75%" (rounded down), or "final" (after the final norm).
    pub layer: Layer,
    /// Tokens of the reset window, W, if there are no `stages`. Default 24.
    pub window: Option<u32>,
    /// Instead of `window`: stages such as `[[8, 0.4], [24, 0.15], [128]]`. Every candidate edge runs 8 tokens, the best 40 % of all of them run on to 24, the
    /// best 15 % of all to 128. By `lr`, which must then be the only readout of the reset pass.
    pub stages: Option<Vec<StageEntry>>,
    /// Bytes that windows may keep between stages; over it, one is run again from its start. Changes speed and memory only.
    pub stage_memory: u64,
    /// Positions skipped at the start of the window, s.
    pub skip: u32,
    /// Positions of the reset pass.
    pub positions: PositionsWord,
    /// What stands before the window: `none`, `bos`, `document`, `token:<special token>`, `separator:<text>` or `local:<tokens>`.
    pub reset_prefix: String,
    /// Tokens of one full pass; at most the model's own context is used.
    pub context: u32,
    /// Tokens of one batch. Changes speed and memory only.
    pub batch_tokens: u32,
}

impl Default for Score {
    fn default() -> Self {
        Self {
            readouts: vec![ReadoutWord::Rr],
            encoder: "minilm-l6".into(),
            layer: Layer::Word("75%".into()),
            window: None,
            stages: None,
            stage_memory: 1 << 30,
            skip: 1,
            positions: PositionsWord::Original,
            reset_prefix: "none".into(),
            context: 8192,
            batch_tokens: 1024,
        }
    }
}

impl Score {
    /// Tokens of the reset window, W: of the last stage.
    #[must_use]
    pub fn window(&self) -> u32 {
        match &self.stages {
            Some(stages) => stages.last().map_or(0, |s| s.horizon),
            None => self.window.unwrap_or(24),
        }
    }

    /// The stages before the last.
    #[must_use]
    pub fn early_stages(&self) -> Vec<Stage> {
        let entries = self.stages.as_deref().unwrap_or_default();
        let early = &entries[..entries.len().saturating_sub(1)];
        early.iter().map(|s| Stage { horizon: s.horizon, keep: s.keep.unwrap_or(1.0) }).collect()
    }
}

/// A stage: tokens of the window, and, but for the last stage, the share of all candidates that go on.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "Vec<f64>", into = "Vec<f64>")]
#[schemars(with = "Vec<f64>")]
pub struct StageEntry {
    /// Tokens.
    pub horizon: u32,
    /// Share of all candidates, in 0..1.
    pub keep: Option<f64>,
}

impl TryFrom<Vec<f64>> for StageEntry {
    type Error = String;

    fn try_from(entry: Vec<f64>) -> Result<Self, String> {
        let (horizon, keep) = match entry[..] {
            [horizon] => (horizon, None),
            [horizon, keep] => (horizon, Some(keep)),
            _ => return Err(format!("a stage is [tokens, share], the last one [tokens]; got {entry:?}")),
        };
        if horizon.fract() != 0.0 || !(0.0..=4096.0).contains(&horizon) {
            return Err(format!("{horizon} is no number of tokens up to 4096"));
        }
        Ok(Self { horizon: horizon as u32, keep })
    }
}

impl From<StageEntry> for Vec<f64> {
    fn from(entry: StageEntry) -> Self {
        std::iter::once(f64::from(entry.horizon)).chain(entry.keep).collect()
    }
}

/// A readout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ReadoutWord {
    /// Right Reset: mean cosine of full and reset states at one layer.
    Rr,
    /// Observed-token likelihood ratio, negated: how much less likely the tokens that come are without the prefix. Runs the whole model.
    Lr,
    /// KL divergence of the predictions, negated: an evaluation reference, the dearest of the three.
    Kl,
    /// Embedding boundary: one minus the cosine of the embeddings of the 64 tokens on both sides, by `score.encoder`. Needs no inference of the language model.
    Embed,
}

impl ReadoutWord {
    /// The readout.
    #[must_use]
    pub fn readout(self) -> Readout {
        match self {
            Self::Rr => Readout::Rr,
            Self::Lr => Readout::Lr,
            Self::Kl => Readout::Kl,
            Self::Embed => Readout::Embed,
        }
    }

    /// The readout of a word.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        [Self::Rr, Self::Lr, Self::Kl, Self::Embed].into_iter().find(|r| r.readout().as_str() == word)
    }
}

/// A layer as typed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Layer {
    /// Block number; 0 is the embeddings.
    Number(u32),
    /// "75%" or "final".
    Word(String),
}

/// How positions of a reset pass are numbered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PositionsWord {
    /// As in the document.
    Original,
    /// From 0.
    Reindexed,
}

/// The `[edges]` table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EdgesTable {
    /// One candidate per this many tokens.
    pub grid: u32,
    /// Whether every sentence end is a candidate too.
    pub sentence_ends: bool,
}

impl Default for EdgesTable {
    fn default() -> Self {
        Self { grid: 8, sentence_ends: true }
    }
}

/// The `[segment]` table. Changing it needs no inference.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Segment {
    /// What is maximised.
    pub objective: Objective,
    /// The cut penalty, rho. For percentiles: an edge is worth cutting at if its utility exceeds it; default 0.95. For chunk damage: a cut may cost about so
    /// many nats; default 22, found for SmolLM2-135M.
    pub penalty: Option<f64>,
    /// Instead of `penalty`: the mean chunk length to aim for, in tokens.
    pub target_mean_tokens: Option<f64>,
    /// Instead of an open count: exactly this many chunks per document.
    pub count: Option<u32>,
    /// Instead of `count`: an integer column that holds it.
    pub count_column: Option<String>,
    /// Weights of the readouts' percentiles, such as `{ rr = 1.0, lr = 1.0 }`, also at shorter horizons than `score.window`: `{ "rr@16" = 1.0, lr = 0.5 }`.
    /// None is the first readout alone.
    pub utility: Option<BTreeMap<String, f64>>,
    /// Soft target of a chunk, T, in tokens.
    pub target: u32,
    /// Hard minimum of a chunk, Lmin, in tokens.
    pub min: u32,
    /// Hard maximum of a chunk, Lmax, in tokens.
    pub max: u32,
    /// Length coefficient, lambda. Default 0.02 for percentiles, 15 (nats) for chunk damage.
    pub length_weight: Option<f64>,
}

impl Segment {
    /// rho.
    #[must_use]
    pub fn penalty(&self) -> f64 {
        self.penalty.unwrap_or(match self.objective {
            Objective::Percentile => 0.95,
            Objective::ChunkDamage => 22.0,
        })
    }

    /// lambda.
    #[must_use]
    pub fn length_weight(&self) -> f64 {
        self.length_weight.unwrap_or(match self.objective {
            Objective::Percentile => 0.02,
            Objective::ChunkDamage => 15.0,
        })
    }

    /// Penalties of the objective.
    #[must_use]
    pub fn scale(&self) -> Scale {
        match self.objective {
            Objective::Percentile => PERCENTILES,
            Objective::ChunkDamage => NATS,
        }
    }
}

impl Default for Segment {
    fn default() -> Self {
        Self {
            objective: Objective::Percentile,
            penalty: None,
            target_mean_tokens: None,
            count: None,
            count_column: None,
            utility: None,
            target: 192,
            min: 48,
            max: 384,
            length_weight: None,
        }
    }
}

/// The objective of segmentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Objective {
    /// Percentiles of scores within the document.
    Percentile,
    /// What the removed prefix knew about the whole chunk, in nats, by the curves of `lr`.
    ChunkDamage,
}

/// The `[cache]` table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Cache {
    /// Folder of the score cache; none is the user's cache folder.
    pub path: Option<PathBuf>,
    /// What to do about a document that is not in the cache.
    pub on_miss: OnMiss,
    /// Whether the cache is used.
    pub mode: CacheMode,
    /// Bytes on disk beyond which nothing more is written; none is no limit.
    pub max_bytes: Option<u64>,
}

impl Default for Cache {
    fn default() -> Self {
        Self { path: None, on_miss: OnMiss::Score, mode: CacheMode::On, max_bytes: None }
    }
}

/// What to do about a document that is not in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnMiss {
    /// Score it.
    Score,
    /// Stop: never start inference by surprise.
    Error,
    /// Leave it out and count it.
    Skip,
}

/// Whether the cache is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CacheMode {
    /// Read and written.
    On,
    /// Neither.
    Off,
}

/// The `[output]` table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Output {
    /// Folder of the output; `-` is standard output. Relative to the pipeline file.
    pub path: Option<String>,
    /// File format.
    pub format: OutputFormat,
    /// Compression of Parquet and Arrow files.
    pub compression: Compression,
    /// Whether chunks carry `source_file` and `source_row`.
    pub provenance: bool,
}

impl Default for Output {
    fn default() -> Self {
        Self { path: None, format: OutputFormat::Parquet, compression: Compression::Zstd, provenance: true }
    }
}

/// Format of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OutputFormat {
    /// Apache Parquet; an Arrow IPC stream on standard output.
    Parquet,
    /// Arrow IPC file; a stream on standard output.
    Arrow,
    /// JSON lines.
    Jsonl,
}

impl OutputFormat {
    /// Extension of its files.
    #[must_use]
    pub fn extension(self) -> &'static str {
        match self {
            Self::Parquet => "parquet",
            Self::Arrow => "arrow",
            Self::Jsonl => "jsonl",
        }
    }
}

/// Compression of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Compression {
    /// zstd.
    Zstd,
    /// Snappy (Parquet only).
    Snappy,
    /// None.
    None,
}

/// Where the tables of a pipeline come from, later ones over earlier ones.
#[derive(Debug, Clone, Default)]
pub struct SpecSources {
    /// The pipeline file.
    pub file: PathBuf,
    /// Overlay files.
    pub overlays: Vec<PathBuf>,
    /// `KEY=VALUE` settings; a value is TOML, else a string.
    pub settings: Vec<String>,
}

impl Pipeline {
    /// Reads a pipeline: file < overlays < settings. Paths in a file become relative to it.
    ///
    /// # Errors
    /// [`SpecError`] that names the key or file, and the nearest known key for an unknown one.
    pub fn load(sources: &SpecSources) -> Result<Self, SpecError> {
        Self::layered(std::iter::once(&sources.file).chain(&sources.overlays), &sources.settings)
    }

    /// A pipeline without a file: overlays < settings.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn with_settings(overlays: &[PathBuf], settings: &[String]) -> Result<Self, SpecError> {
        Self::layered(overlays, settings)
    }

    fn layered<'a>(files: impl IntoIterator<Item = &'a PathBuf>, settings: &[String]) -> Result<Self, SpecError> {
        let mut table = toml::Table::new();
        for file in files {
            let text = std::fs::read_to_string(file).map_err(|source| SpecError::Io { path: file.clone(), source })?;
            let mut layer: toml::Table = text
                .parse()
                .map_err(|e: toml::de::Error| SpecError::Syntax { origin: file.display().to_string(), reason: e.to_string() })?;
            rebase(&mut layer, file.parent().unwrap_or(Path::new("")));
            merge(&mut table, layer);
        }
        for setting in settings {
            let (key, value) = setting.split_once('=').ok_or_else(|| SpecError::Syntax {
                origin: format!("--set {setting}"),
                reason: "expected KEY=VALUE, such as --set segment.penalty=0.9".into(),
            })?;
            merge(&mut table, setting_table(key.trim(), value.trim())?);
        }
        Self::from_table(table)
    }

    /// Reads a pipeline from TOML text.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn parse(text: &str) -> Result<Self, SpecError> {
        let table = text.parse().map_err(|e: toml::de::Error| SpecError::Syntax { origin: "pipeline".into(), reason: e.to_string() })?;
        Self::from_table(table)
    }

    fn from_table(given: toml::Table) -> Result<Self, SpecError> {
        let preset = Preset::of(&given)?.table();
        let mut table: toml::Table =
            preset.parse().map_err(|e: toml::de::Error| SpecError::Syntax { origin: "preset".into(), reason: e.to_string() })?;
        merge(&mut table, given);
        let pipeline: Self = serde_path_to_error::deserialize(table).map_err(|e| {
            let (path, reason) = (e.path().to_string(), e.into_inner().message().to_owned());
            SpecError::Value { key: path, reason: with_nearest(&reason) }
        })?;
        pipeline.validate()?;
        Ok(pipeline)
    }

    /// Checks values that the types let through.
    ///
    /// # Errors
    /// [`SpecError::Value`] that names the key.
    pub fn validate(&self) -> Result<(), SpecError> {
        let fail = |key: &str, reason: String| Err(SpecError::Value { key: key.into(), reason });
        let s = &self.segment;
        if s.target == 0 || s.max == 0 || s.min > s.max {
            return fail("segment", format!("needs target >= 1 and min <= max, got target {}, min {}, max {}", s.target, s.min, s.max));
        }
        if !s.length_weight().is_finite() || s.length_weight() < 0.0 {
            return fail("segment.length_weight", format!("must be a number >= 0, got {}", s.length_weight()));
        }
        let (low, high) = s.scale().range;
        if s.penalty.is_some_and(|p| !(low..=high).contains(&p)) {
            let what = match s.objective {
                Objective::Percentile => "utilities lie in 0..1",
                Objective::ChunkDamage => "nats",
            };
            return fail("segment.penalty", format!("must lie in {low}..={high} ({what}), got {}", s.penalty()));
        }
        if s.objective == Objective::ChunkDamage && !self.score.readouts.contains(&ReadoutWord::Lr) {
            return fail("segment.objective", "chunk_damage is read off the curves of lr; add \"lr\" to score.readouts".into());
        }
        let ways = [s.penalty.is_some(), s.target_mean_tokens.is_some(), s.count.is_some(), s.count_column.is_some()];
        if ways.iter().filter(|w| **w).count() > 1 {
            return fail("segment", "give one of penalty, target_mean_tokens, count and count_column".into());
        }
        if s.target_mean_tokens.is_some_and(|m| !m.is_finite() || m < 1.0) {
            return fail("segment.target_mean_tokens", "must be a number of tokens, at least 1".into());
        }
        if s.count == Some(0) {
            return fail("segment.count", "must be at least 1".into());
        }
        if let Some(weights) = &s.utility {
            if weights.is_empty() {
                return fail("segment.utility", "is empty; leave it out to use the first readout".into());
            }
            for key in weights.keys() {
                match super::utility::parse_term(key, self.score.window()) {
                    Ok((readout, _)) if self.score.readouts.contains(&readout) => {}
                    Ok((readout, _)) => {
                        let known: Vec<_> = self.score.readouts.iter().map(|r| r.readout().as_str()).collect();
                        let what = format!(
                            "{:?} is not scored (score.readouts has: {}); add it there",
                            readout.readout().as_str(),
                            known.join(", ")
                        );
                        return fail("segment.utility", what);
                    }
                    Err(reason) => return fail("segment.utility", reason),
                }
            }
            if !weights.values().all(|w| w.is_finite() && *w > 0.0) {
                return fail("segment.utility", "weights must be numbers > 0".into());
            }
        }
        let readouts = &self.score.readouts;
        if readouts.is_empty() || readouts.iter().enumerate().any(|(i, r)| readouts[..i].contains(r)) {
            return fail("score.readouts", "must name one or more of rr, lr, kl, embed, each once".into());
        }
        if self.score.window.is_some() && self.score.stages.is_some() {
            return fail("score", "give window or stages, not both: window = W is stages = [[W]]".into());
        }
        if self.score.window() == 0 || self.score.window() > 4096 {
            return fail("score.window", format!("must lie in 1..=4096, got {}", self.score.window()));
        }
        if let Some(stages) = &self.score.stages {
            let last = stages.len().saturating_sub(1);
            if stages.iter().enumerate().any(|(i, s)| s.keep.is_none() != (i == last)) {
                return fail(
                    "score.stages",
                    "every stage but the last needs a share, the last has none: [[8, 0.4], [24, 0.15], [128]]".into(),
                );
            }
        }
        if self.score.context < 16 {
            return fail("score.context", format!("must be at least 16, got {}", self.score.context));
        }
        if self.edges.grid == 0 {
            return fail("edges.grid", "must be at least 1".into());
        }
        if let Err(reason) = self.model.device.parse::<Device>() {
            return fail("model.device", reason);
        }
        if self.model.threads == Some(0) {
            return fail("model.threads", "must be at least 1; leave it out for one per processor".into());
        }
        if self.output.format == OutputFormat::Arrow && self.output.compression == Compression::Snappy {
            return fail("output.compression", "Arrow files can be zstd or none".into());
        }
        Ok(())
    }
}

/// Puts `over` over `base`, table by table.
fn merge(base: &mut toml::Table, over: toml::Table) {
    for (key, value) in over {
        match (base.get_mut(&key), value) {
            (Some(toml::Value::Table(old)), toml::Value::Table(new)) if key != "utility" && key != "columns" => merge(old, new),
            (_, value) => {
                // A later way of fixing the number of cuts, or the window, replaces an earlier one.
                const WAYS: [&[&str]; 2] = [&["penalty", "target_mean_tokens", "count", "count_column"], &["window", "stages"]];
                for ways in WAYS.iter().filter(|ways| ways.contains(&key.as_str())) {
                    ways.iter().for_each(|way| drop(base.remove(*way)));
                }
                base.insert(key, value);
            }
        }
    }
}

/// Makes the paths of a file relative to its folder.
fn rebase(table: &mut toml::Table, folder: &Path) {
    let join = |value: &mut toml::Value| {
        if let toml::Value::String(path) = value
            && path != "-"
            && Path::new(path.as_str()).is_relative()
        {
            *path = folder.join(&*path).to_string_lossy().into_owned();
        }
    };
    let mut at = |section: &str, key: &str| {
        let value = table.get_mut(section).and_then(|t| t.get_mut(key));
        match value {
            Some(toml::Value::Array(list)) => list.iter_mut().for_each(join),
            Some(value) if !matches!(key, "name" | "encoder") => join(value),
            // A model's name is a path only if it looks like one: a name on the hub does too, unless there is such a file.
            Some(toml::Value::String(name)) if name.contains(['/', '.']) && Path::new(name.as_str()).is_relative() => {
                let path = folder.join(&*name);
                let known = crate::model::BUILT_IN.iter().any(|b| b.name == name) || crate::model::HubName::parse(name).is_some();
                if path.exists() || !known {
                    *name = path.to_string_lossy().into_owned();
                }
            }
            _ => {}
        }
    };
    at("input", "paths");
    at("model", "name");
    at("score", "encoder");
    at("cache", "path");
    at("output", "path");
}

/// The nested table that `a.b=value` stands for.
fn setting_table(key: &str, value: &str) -> Result<toml::Table, SpecError> {
    let parsed = format!("v = {value}").parse::<toml::Table>().ok().and_then(|mut t| t.remove("v"));
    let mut value = parsed.unwrap_or_else(|| toml::Value::String(value.to_owned()));
    if key.is_empty() || key.split('.').any(str::is_empty) {
        return Err(SpecError::Syntax { origin: format!("--set {key}"), reason: "the key is empty".into() });
    }
    let mut table = toml::Table::new();
    for (depth, part) in key.rsplit('.').enumerate() {
        if depth > 0 {
            value = toml::Value::Table(std::mem::take(&mut table));
        }
        table.insert(part.to_owned(), std::mem::replace(&mut value, toml::Value::Boolean(false)));
    }
    Ok(table)
}

/// Adds the nearest known name to serde's sentence about an unknown one.
fn with_nearest(reason: &str) -> String {
    let quoted: Vec<&str> = reason.split('`').skip(1).step_by(2).collect();
    let Some((unknown, known)) = quoted.split_first() else {
        return reason.to_owned();
    };
    if !reason.starts_with("unknown ") {
        return reason.to_owned();
    }
    let nearest = known
        .iter()
        .map(|name| (strsim::damerau_levenshtein(unknown, name), *name))
        .min()
        .filter(|(distance, name)| *distance <= name.len().max(unknown.len()) / 2);
    match nearest {
        Some((_, name)) => format!("{reason}; did you mean `{name}`?"),
        None => reason.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_key_names_the_nearest() {
        let error = Pipeline::parse("[segment]\npenalti = 0.9").unwrap_err().to_string();
        assert!(error.contains("penalti") && error.contains("did you mean `penalty`?") && error.starts_with("segment"), "{error}");
        let error = Pipeline::parse("[segmant]\npenalty = 0.9").unwrap_err().to_string();
        assert!(error.contains("did you mean `segment`?"), "{error}");
        let error = Pipeline::parse("[input]\non_bad_row = \"skp\"").unwrap_err().to_string();
        assert!(error.contains("did you mean `skip`?"), "{error}");
    }

    #[test]
    fn presets_lie_under_the_pipeline_and_settings_by_hand_start_from_the_papers() {
        let parse = |text: &str| Pipeline::parse(text).unwrap();
        let standard = parse("[input]\npaths = [\"a\"]");
        assert_eq!((standard.segment.objective, standard.segment.penalty(), standard.edges.grid), (Objective::ChunkDamage, 22.0, 32));
        assert_eq!((standard.score.window(), standard.score.early_stages().len()), (256, 3));
        let paper = parse("preset = \"paper\"");
        assert_eq!(
            (paper.score.clone(), paper.edges.grid, paper.segment.penalty()),
            (Score { window: Some(24), ..Score::default() }, 8, 0.95)
        );
        for by_hand in ["[score]\nlayer = 3", "[score]\nwindow = 24", "[segment]\nobjective = \"percentile\"", "[segment]\npenalty = 0.9"] {
            assert_eq!(parse(by_hand).score.readouts, [ReadoutWord::Rr], "{by_hand}");
        }
        assert_eq!(parse("[segment]\npenalty = 30.0").segment.objective, Objective::ChunkDamage);
        let longer = parse("preset = \"standard\"\n[score]\nwindow = 64");
        assert_eq!((longer.score.window(), longer.score.stages), (64, None), "a window replaces the preset's stages");
        assert_eq!(parse("preset = \"thorough\"").score.window(), 256);
        assert!(Pipeline::parse("preset = \"thorogh\"").unwrap_err().to_string().contains("did you mean `thorough`?"));
    }

    #[test]
    fn file_overlay_setting_take_precedence_in_that_order() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let file = write("a.toml", "[segment]\npenalty = 0.9\nmin = 10\n[input]\npaths = [\"in\"]");
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        let overlay = write("sub/b.toml", "[segment]\ntarget_mean_tokens = 99\n[output]\npath = \"out\"");
        let load = |settings: &[&str]| {
            let settings = settings.iter().map(|s| (*s).to_owned()).collect();
            Pipeline::load(&SpecSources { file: file.clone(), overlays: vec![overlay.clone()], settings })
        };
        let spec = load(&["segment.min=12", "input.text_column=body"]).unwrap();
        assert_eq!((spec.segment.min, spec.segment.target_mean_tokens, spec.segment.penalty), (12, Some(99.0), None));
        assert_eq!(spec.input.paths, [dir.path().join("in").to_string_lossy()]);
        assert_eq!(spec.output.path, Some(dir.path().join("sub/out").to_string_lossy().into_owned()));
        assert_eq!(spec.input.text_column, "body");
        assert_eq!(load(&["segment.penalty=0.5"]).unwrap().segment.penalty(), 0.5);
        assert!(load(&["preset=paper", "segment.penalty=7"]).unwrap_err().to_string().contains("segment.penalty"));
        assert!(load(&["nonsense"]).unwrap_err().to_string().contains("KEY=VALUE"));
    }
}
