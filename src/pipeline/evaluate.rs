//! The `calibrate` and `eval` commands: methods side by side on documents whose true units are known.
//!
//! The sample is held in memory: texts, tokens and, one method after another, scores.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Int64Type};
use rayon::prelude::*;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::sync::watch;

use super::chunks::{Judge, Prepared};
use super::documents::{DocState, Need, Scored, Scorer, blocking};
use super::methods::{Method, weights};
use super::operator::limits;
use super::run::{Rows, name, stopped};
use super::spec::{MethodSettings, Objective, PassThrough, Pipeline, ReadoutWord};
use super::summary::{ChunkCounts, Lengths};
use super::utility::Recipe;
use super::{RunError, Stop};
use crate::eval::{Counts, Interval, Measure, Strata, compare, resample};
use crate::io::{IoError, SourceBatch, TextCell};
use crate::model::{self, Chat};
use crate::score::{Comparator, OMITTED, PassiveScratch, prompted, surface};
use crate::segment::{Limits, percentiles};
use crate::text::{Edge, EdgePolicy, Tokenizer, Tokens, find_edges};

/// Weights that calibration tries for every term of a sum but the first.
const WEIGHTS: [f64; 4] = [0.25, 0.5, 1.0, 2.0];

/// What is compared, on what.
pub struct EvalOptions {
    /// Folder of models.
    pub models: PathBuf,
    /// Column that holds the byte at which each true unit begins.
    pub gold: String,
    /// Column that names the domain: documents are drawn again within theirs, and figures given for each.
    pub domain: Option<String>,
    /// The methods.
    pub methods: Vec<Method>,
    /// Instruction model of the prompted segmenter; without one the pipeline's.
    pub prompt_model: Option<String>,
    /// Chunks made elsewhere, by the name to give them: files with `doc_id` and `byte_start`.
    pub chunks: Vec<(String, PathBuf)>,
    /// Rows to read at most.
    pub limit: Option<u64>,
    /// Seed of the random method and of what is drawn.
    pub seed: u64,
    /// Says when to stop.
    pub stop: watch::Receiver<Option<Stop>>,
}

/// What calibration found for a method.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct Calibrated {
    /// The method.
    pub method: String,
    /// Penalty and weights.
    #[serde(flatten)]
    #[schemars(flatten)]
    pub settings: MethodSettings,
    /// Clean-unit recovery on the sample.
    pub clean_unit_recovery: f64,
    /// Partition F1 on the sample.
    pub partition_f1: f64,
    /// Chunks over true units.
    pub chunks_per_unit: f64,
}

/// What a method does on the sample.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct Evaluated {
    /// The method.
    pub method: String,
    /// Its penalty; none of chunks made elsewhere.
    pub penalty: Option<f64>,
    /// Whether the penalty was calibrated, rather than the default.
    pub calibrated: bool,
    /// Of a sum, the weight of each readout.
    pub utility: Option<BTreeMap<String, f64>>,
    /// Measures with their intervals.
    pub measures: BTreeMap<Measure, Interval>,
    /// Measures less those of the baseline, document by document drawn alike; none of the baseline itself.
    pub difference: Option<BTreeMap<Measure, Interval>>,
    /// Measures of each domain.
    pub domains: BTreeMap<String, BTreeMap<Measure, f64>>,
    /// Chunk lengths.
    pub chunks: ChunkCounts,
    /// Tokens that went through the language model for this method, documents from the cache left out; comparators share one pass.
    pub forward_tokens: u64,
    /// Seconds of scoring.
    pub seconds: f64,
    /// Documents whose scores were in the cache, so that the two figures before say nothing of them.
    pub from_cache: u64,
    /// Of the prompted segmenter, the share of candidates that the model's answers left out; they count as 0.
    pub omitted: Option<f64>,
}

/// An evaluation.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct Evaluation {
    /// Documents.
    pub documents: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Their true units.
    pub units: u64,
    /// What differences are taken from.
    pub baseline: String,
    /// Times that documents were drawn again.
    pub resamples: usize,
    /// Methods, as asked for.
    pub methods: Vec<Evaluated>,
}

/// A document of the sample.
struct Gold {
    id: String,
    domain: String,
    tokens: Tokens,
    /// First token of every unit but the first.
    boundaries: Vec<u32>,
}

struct Sample {
    /// Batches of rows, and which of them are documents.
    batches: Vec<(Arc<SourceBatch>, Vec<usize>)>,
    /// All documents, in order.
    documents: Vec<Gold>,
}

impl Sample {
    fn texts(&self) -> impl Iterator<Item = &str> {
        let rows = self.batches.iter().flat_map(|(batch, places)| places.iter().map(move |place| (batch, *place)));
        rows.filter_map(|(batch, place)| if let TextCell::Text(text) = batch.text(place) { Some(text) } else { None })
    }
}

/// Counts of every document, and the tokens of its chunks.
type CutDocuments = (Vec<Counts>, Vec<Vec<u32>>);

/// A method's scores of the sample, ready to be cut.
struct Judged {
    documents: Vec<Scored>,
    judge: Judge,
    limits: Limits,
    objective: Objective,
    forward_tokens: u64,
    seconds: f64,
    from_cache: u64,
    /// Share of candidates that an instruction model said nothing of.
    omitted: Option<f64>,
}

/// Finds for each method the penalty of best clean-unit recovery, partition F1 breaking ties, and the middle one of penalties that are equally good; with
/// `fusion`, also the weights of sums, among a few.
///
/// # Errors
/// [`RunError`], also for true units that do not fit their document.
pub async fn find_penalties(pipeline: &Pipeline, options: EvalOptions, fusion: bool) -> Result<Vec<Calibrated>, RunError> {
    let stop = stopped(options.stop.clone());
    let work = async {
        let mut found = Vec::new();
        let mut bench = Bench::new(pipeline, &options).await?;
        for method in &options.methods {
            let judged = bench.judge(method).await?;
            let variants = match method {
                Method::Readouts(terms) if fusion && terms.len() > 1 => sums(terms),
                _ => vec![method.clone()],
            };
            let (own, sample) = (pipeline.clone(), Arc::clone(&bench.sample));
            let (fused, name) = (variants.len() > 1, method.name());
            found.push(blocking(move || best(&own, &sample, judged, &variants, fused, name)).await?);
        }
        Ok(found)
    };
    tokio::select! { biased; reason = stop => Err(RunError::Stopped(reason)), found = work => found }
}

/// What calibration found, as TOML to lay over a pipeline: `segment.penalty` for the pipeline's own method, `eval.methods` for all.
#[must_use]
pub fn overlay(found: &[Calibrated]) -> String {
    let mut text = "# Found by `right-reset calibrate`, with clean-unit recovery and partition F1 on its sample.\n".to_owned();
    if let Some(own) = found.iter().find(|c| c.method == Method::Pipeline.name()) {
        text += &format!("[segment]\npenalty = {:?}\n", own.settings.penalty);
    }
    for Calibrated { method, settings, clean_unit_recovery, partition_f1, .. } in found {
        text += &format!(
            "\n# {clean_unit_recovery:.3}, {partition_f1:.3}\n[eval.methods.{}]\npenalty = {:?}\n",
            quoted(method),
            settings.penalty
        );
        if let Some(weights) = &settings.utility {
            let weights: Vec<String> = weights.iter().map(|(readout, weight)| format!("{readout} = {weight:?}")).collect();
            text += &format!("utility = {{ {} }}\n", weights.join(", "));
        }
    }
    text
}

/// A key as TOML has it: quoted unless it is a bare word.
fn quoted(key: &str) -> String {
    let bare = key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    if bare { key.to_owned() } else { format!("{key:?}") }
}

/// Every choice of weights for the terms of a sum but the first.
fn sums(terms: &[(ReadoutWord, f64)]) -> Vec<Method> {
    let mut all = vec![vec![(terms[0].0, 1.0)]];
    for (word, _) in &terms[1..] {
        all = all.into_iter().flat_map(|sum| WEIGHTS.map(|weight| [sum.clone(), vec![(*word, weight)]].concat())).collect();
    }
    all.into_iter().map(Method::Readouts).collect()
}

/// Penalties that are tried.
fn grid(objective: Objective) -> Vec<f64> {
    match objective {
        Objective::Percentile => (100..=220).map(|i| f64::from(i) / 200.0).collect(),
        Objective::ChunkDamage => (2..=240).map(|i| f64::from(i) / 2.0).collect(),
    }
}

fn best(own: &Pipeline, sample: &Sample, judged: Judged, variants: &[Method], fused: bool, name: String) -> Calibrated {
    let penalties = grid(judged.objective);
    // Recovery and F1 of every penalty of every variant, in order.
    let mut tried: Vec<(&Method, f64, Counts)> = Vec::new();
    let mut judged = judged;
    for variant in variants {
        if fused {
            let recipe = Recipe::new(&variant.pipeline(own));
            judged.documents.par_iter_mut().for_each(|document| document.judge_by(&recipe));
        }
        let counts = cut(sample, &judged, &penalties);
        tried.extend(penalties.iter().zip(counts).map(|(&penalty, counts)| (variant, penalty, sum(&counts))));
    }
    let worth = |c: &Counts| (Measure::CleanUnitRecovery.of(c), Measure::PartitionF1.of(c));
    let top = tried.iter().map(|t| worth(&t.2)).fold((f64::MIN, f64::MIN), |a, b| if b > a { b } else { a });
    let equals: Vec<_> = tried.iter().filter(|t| worth(&t.2) == top).collect();
    let (variant, penalty, counts) = equals[equals.len() / 2];
    let utility = match variant {
        Method::Readouts(terms) if terms.len() > 1 => Some(weights(terms)),
        _ => None,
    };
    Calibrated {
        method: name,
        settings: MethodSettings { penalty: *penalty, utility },
        clean_unit_recovery: top.0,
        partition_f1: top.1,
        chunks_per_unit: Measure::ChunksPerUnit.of(counts),
    }
}

/// The candidates of a document.
pub(super) fn candidates(document: &Scored) -> impl Iterator<Item = &Edge> {
    document.edges.iter().filter(|edge| edge.is_candidate())
}

fn sum(counts: &[(Counts, Vec<u32>)]) -> Counts {
    let mut total = Counts::default();
    counts.iter().for_each(|(c, _)| total += c);
    total
}

/// For each penalty the counts of every document, and the tokens of its chunks.
fn cut(sample: &Sample, judged: &Judged, penalties: &[f64]) -> Vec<Vec<(Counts, Vec<u32>)>> {
    let of_document = |(document, gold): (&Scored, &Gold)| -> Vec<(Counts, Vec<u32>)> {
        let candidates: Vec<u32> = candidates(document).map(|e| e.token.0).collect();
        let cut = Prepared::new(document, &judged.judge).sweep(&judged.limits, penalties);
        let counts = |(lengths, _): (Vec<u32>, bool)| {
            let mut cuts: Vec<u32> = lengths.iter().scan(0, |end, length| Some(std::mem::replace(end, *end + length) + length)).collect();
            cuts.pop();
            (compare(document.tokens, &gold.boundaries, &cuts, &candidates), lengths)
        };
        cut.into_iter().map(counts).collect()
    };
    let by_document: Vec<Vec<_>> = judged.documents.par_iter().zip(&sample.documents).map(of_document).collect();
    (0..penalties.len()).map(|p| by_document.iter().map(|cut| cut[p].clone()).collect()).collect()
}

/// Compares methods, each at the penalty that `pipeline.eval` has for it, else at its default. Differences are taken from the method named `baseline`.
///
/// # Errors
/// [`RunError`], also for true units that do not fit their document and for a baseline that is not among the methods.
pub async fn evaluate(pipeline: &Pipeline, options: EvalOptions, baseline: Option<&str>, resamples: usize) -> Result<Evaluation, RunError> {
    let names: Vec<String> = options.methods.iter().map(Method::name).chain(options.chunks.iter().map(|c| c.0.clone())).collect();
    let usual = names.iter().position(|n| n == "embed").unwrap_or(0);
    let base = match baseline {
        None => usual,
        Some(name) => names
            .iter()
            .position(|n| n == name)
            .ok_or_else(|| IoError::Input(format!("the baseline {name:?} is not among the methods: {}", names.join(", "))))?,
    };
    let stop = stopped(options.stop.clone());
    let work = async {
        let mut bench = Bench::new(pipeline, &options).await?;
        let (mut rows, mut all): (_, Vec<CutDocuments>) = (Vec::new(), Vec::new());
        for (method, name) in options.methods.iter().zip(&names) {
            let settings = pipeline.eval.methods.get(name);
            let method = method.with(settings);
            let judged = bench.judge(&method).await?;
            let penalty = settings.map_or_else(|| method.pipeline(pipeline).segment.penalty(), |s| s.penalty);
            let sample = Arc::clone(&bench.sample);
            let (counts, judged) = blocking(move || (cut(&sample, &judged, &[penalty]).remove(0), judged)).await?;
            rows.push(Evaluated {
                method: name.clone(),
                penalty: Some(penalty),
                calibrated: settings.is_some(),
                utility: if let Method::Readouts(terms) = &method { Some(weights(terms)).filter(|w| w.len() > 1) } else { None },
                measures: BTreeMap::new(),
                difference: None,
                domains: BTreeMap::new(),
                chunks: ChunkCounts::default(),
                forward_tokens: judged.forward_tokens,
                seconds: judged.seconds,
                from_cache: judged.from_cache,
                omitted: judged.omitted,
            });
            all.push(counts.into_iter().unzip());
        }
        for (name, path) in &options.chunks {
            let counts = elsewhere(&bench.sample, path).await?;
            rows.push(Evaluated {
                method: name.clone(),
                penalty: None,
                calibrated: false,
                utility: None,
                measures: BTreeMap::new(),
                difference: None,
                domains: BTreeMap::new(),
                chunks: ChunkCounts::default(),
                forward_tokens: 0,
                seconds: 0.0,
                from_cache: 0,
                omitted: None,
            });
            all.push(counts.into_iter().unzip());
        }
        let sample = Arc::clone(&bench.sample);
        let seed = options.seed;
        let rows = blocking(move || {
            for (row, (counts, lengths)) in rows.iter_mut().zip(&all) {
                row.describe(&sample, counts, lengths);
            }
            let counts: Vec<Vec<Counts>> = all.into_iter().map(|(counts, _)| counts).collect();
            intervals(&sample, &mut rows, &counts, base, resamples, seed);
            rows
        })
        .await?;
        let documents = &bench.sample.documents;
        Ok(Evaluation {
            documents: documents.len() as u64,
            tokens: documents.iter().map(|d| d.tokens.ids.len() as u64).sum(),
            units: documents.iter().map(|d| d.boundaries.len() as u64 + 1).sum(),
            baseline: names[base].clone(),
            resamples,
            methods: rows,
        })
    };
    tokio::select! { biased; reason = stop => Err(RunError::Stopped(reason)), found = work => found }
}

impl Evaluated {
    /// Fills in what needs no baseline, from the counts of each document and the tokens of its chunks.
    fn describe(&mut self, sample: &Sample, counts: &[Counts], lengths: &[Vec<u32>]) {
        let mut domains = BTreeMap::<&str, Counts>::new();
        for (gold, counts) in sample.documents.iter().zip(counts) {
            *domains.entry(&gold.domain).or_default() += counts;
        }
        let of = |counts: &Counts| Measure::ALL.into_iter().map(|m| (m, m.of(counts))).filter(|(_, v)| !v.is_nan()).collect();
        self.domains = domains.iter().map(|(name, counts)| ((*name).to_owned(), of(counts))).collect();
        let mut all = Lengths::default();
        lengths.iter().flatten().for_each(|tokens| all.add(*tokens));
        self.chunks = all.counts();
    }
}

/// Counts of every document, and the tokens of its chunks, for chunks made elsewhere.
async fn elsewhere(sample: &Sample, path: &Path) -> Result<Vec<(Counts, Vec<u32>)>, RunError> {
    let mut pipeline = Pipeline::default();
    pipeline.input.paths = vec![path.to_string_lossy().into_owned()];
    pipeline.input.text_column = "doc_id".into();
    pipeline.input.pass_through = PassThrough::Columns(vec!["byte_start".into()]);
    pipeline.input.columns = [("byte_start".to_owned(), "int64".to_owned())].into();
    let mut input = Rows::open(&pipeline, None)?;
    let mut starts = BTreeMap::<String, Vec<u64>>::new();
    while let Some((_, batch)) = input.next().await? {
        let column = cast(batch.columns.column(0), &DataType::Int64)?;
        let column = column.as_primitive::<Int64Type>();
        for (place, id) in batch.texts().enumerate() {
            let TextCell::Text(id) = id else { continue };
            let start = if column.is_null(place) { None } else { u64::try_from(column.value(place)).ok() };
            let bad = || IoError::Input(format!("{}, row {}: byte_start is no byte", path.display(), batch.rows[place]));
            starts.entry(id.to_owned()).or_default().push(start.ok_or_else(bad)?);
        }
    }
    let of = |(gold, text): (&Gold, &str)| {
        let none = || {
            IoError::Input(format!(
                "{} has no chunk of document {:?}; its doc_id must be that of the input's id column",
                path.display(),
                gold.id
            ))
        };
        let mut starts = starts.get(&gold.id).ok_or_else(none)?.clone();
        starts.sort_unstable();
        let (places, tokens) = (places(text, &gold.tokens), gold.tokens.ids.len() as u32);
        let mut cuts: Vec<u32> =
            starts.iter().map(|start| places.partition_point(|p| p < start) as u32).filter(|t| (1..tokens).contains(t)).collect();
        cuts.dedup();
        let ends = cuts.iter().copied().chain([tokens]);
        let lengths = ends.scan(0, |start, end| Some(end - std::mem::replace(start, end))).collect();
        Ok((compare(tokens, &gold.boundaries, &cuts, &cuts), lengths))
    };
    sample.documents.iter().zip(sample.texts()).map(of).collect()
}

/// Fills in the measures of all methods, and their differences, from the counts of each document.
fn intervals(sample: &Sample, rows: &mut [Evaluated], counts: &[Vec<Counts>], base: usize, resamples: usize, seed: u64) {
    let strata = Strata::by_name(sample.documents.iter().map(|d| d.domain.as_str()));
    let values = |drawn: &[usize]| -> Vec<[f64; Measure::ALL.len()]> {
        let of = |counts: &Vec<Counts>| {
            let mut total = Counts::default();
            drawn.iter().for_each(|&i| total += &counts[i]);
            Measure::ALL.map(|measure| measure.of(&total))
        };
        counts.iter().map(of).collect()
    };
    let whole = values(&(0..sample.documents.len()).collect::<Vec<_>>());
    let drawn = resample(&strata, resamples, seed, values);
    let interval = |value: &dyn Fn(&[[f64; Measure::ALL.len()]]) -> f64| Interval::of(value(&whole), drawn.iter().map(|d| value(d)));
    for (i, row) in rows.iter_mut().enumerate() {
        for (k, measure) in Measure::ALL.into_iter().enumerate() {
            let found = interval(&|v| v[i][k]);
            if found.value.is_nan() {
                continue;
            }
            row.measures.insert(measure, found);
            let difference = interval(&|v| v[i][k] - v[base][k]);
            if i != base && !difference.value.is_nan() {
                row.difference.get_or_insert_default().insert(measure, difference);
            }
        }
    }
}

/// Of each document the scores of its candidates by each comparator.
type PassiveScores = Vec<Vec<Vec<f32>>>;

/// The sample, and what methods share.
struct Bench<'a> {
    pipeline: &'a Pipeline,
    models: &'a Path,
    prompt_model: Option<&'a str>,
    seed: u64,
    sample: Arc<Sample>,
    /// Comparators that read the model, which share a pass.
    passive: Vec<Comparator>,
    /// Their scores, and the seconds that the pass took.
    scored: Option<(Arc<PassiveScores>, f64)>,
}

impl<'a> Bench<'a> {
    async fn new(pipeline: &'a Pipeline, options: &'a EvalOptions) -> Result<Self, RunError> {
        if pipeline.segment.count.is_some() || pipeline.segment.count_column.is_some() || pipeline.segment.target_mean_tokens.is_some() {
            return Err(IoError::Input(
                "methods are compared at penalties; leave segment.count, count_column and target_mean_tokens out".into(),
            )
            .into());
        }
        let tokenizer = Scorer::new(pipeline, &options.models)?.tokenizer().await?;
        let sample = gather(pipeline, options, &tokenizer).await?;
        let passive = options.methods.iter().filter_map(|m| if let Method::Comparator(c) = m { Some(*c) } else { None });
        let passive = passive.filter(|c| c.needs_model()).collect();
        let prompt_model = options.prompt_model.as_deref();
        Ok(Self { pipeline, models: &options.models, prompt_model, seed: options.seed, sample: Arc::new(sample), passive, scored: None })
    }

    /// Scores the sample by a method. One scorer lives at a time: it holds the cache's lock.
    async fn judge(&mut self, method: &Method) -> Result<Judged, RunError> {
        let pipeline = method.pipeline(self.pipeline);
        tracing::info!(event = "scoring", method = method.name(), "scoring");
        let scorer = Arc::new(Scorer::new(&pipeline, self.models)?);
        let (judge, limits, objective) = (Judge::new(&pipeline), limits(&pipeline), pipeline.segment.objective);
        let judged =
            Judged { documents: Vec::new(), judge, limits, objective, forward_tokens: 0, seconds: 0.0, from_cache: 0, omitted: None };
        match method {
            Method::Comparator(which) => self.compare(*which, &pipeline, &scorer, judged).await,
            Method::Prompted => self.ask(&scorer, judged).await,
            _ => self.score(&scorer, judged).await,
        }
    }

    async fn score(&self, scorer: &Arc<Scorer>, judged: Judged) -> Result<Judged, RunError> {
        let began = Instant::now();
        let mut documents = Vec::with_capacity(self.sample.documents.len());
        for (batch, places) in &self.sample.batches {
            let mut states: Vec<Option<DocState>> = scorer.resolve(batch, Need::All).await?.into_iter().map(Some).collect();
            for &place in places {
                let row = batch.rows[place];
                match states[place].take() {
                    Some(DocState::Ready(document)) => documents.push(*document),
                    Some(DocState::Bad(reason)) => return Err(IoError::Input(format!("row {row}: {reason}")).into()),
                    _ => return Err(RunError::NotCached { row, documents: 1 }),
                }
            }
        }
        scorer.store().flush()?;
        let forward_tokens = scorer.engine_stats().map_or(0, |s| s.forward_tokens);
        let from_cache = scorer.counters.from_cache.load(Ordering::Relaxed);
        Ok(Judged { documents, forward_tokens, seconds: began.elapsed().as_secs_f64(), from_cache, ..judged })
    }

    async fn compare(&mut self, which: Comparator, pipeline: &Pipeline, scorer: &Arc<Scorer>, judged: Judged) -> Result<Judged, RunError> {
        let (policy, target, seed, sample) = (scorer.policy(), pipeline.segment.target, self.seed, Arc::clone(&self.sample));
        let began = Instant::now();
        if which.needs_model() && self.scored.is_none() {
            let passive = scorer.passive().await?;
            let (sample, comparators) = (Arc::clone(&sample), self.passive.clone());
            let scores = blocking(move || {
                let texts: Vec<&str> = sample.texts().collect();
                let of = |scratch: &mut PassiveScratch, (text, gold): (&&str, &Gold)| {
                    let edges: Vec<u32> =
                        find_edges(text, &gold.tokens, policy).edges.iter().filter(|e| e.is_candidate()).map(|e| e.token.0).collect();
                    passive.scores(&gold.tokens.ids, &edges, &comparators, scratch)
                };
                texts.par_iter().zip(&sample.documents).map_init(PassiveScratch::default, of).collect::<Result<Vec<_>, _>>()
            })
            .await??;
            self.scored = Some((Arc::new(scores), began.elapsed().as_secs_f64()));
        }
        let shared = self.scored.clone().filter(|_| which.needs_model());
        let number = self.passive.iter().position(|c| *c == which).unwrap_or(0);
        let scores = shared.as_ref().map(|(scores, _)| Arc::clone(scores));
        let documents = blocking(move || {
            let own = |i: usize, text: &str, candidates: &[&Edge]| match &scores {
                Some(scores) => scores[i][number].clone(),
                None => surface(which, text, candidates, target, seed).unwrap_or_default(),
            };
            scored(&sample, policy, own)
        })
        .await?;
        let tokens = self.sample.documents.iter().map(|d| d.tokens.ids.len() as u64).sum();
        let (forward_tokens, seconds) = shared.map_or((0, began.elapsed().as_secs_f64()), |(_, seconds)| (tokens, seconds));
        Ok(Judged { documents, forward_tokens, seconds, ..judged })
    }

    /// Scores the sample by what an instruction model says. What it said of a text before is in the cache.
    async fn ask(&self, scorer: &Scorer, judged: Judged) -> Result<Judged, RunError> {
        let name = self.prompt_model.unwrap_or(&self.pipeline.model.name);
        let path = model::resolve(name, self.models)?.path;
        let (policy, store) = (scorer.policy(), scorer.store());
        let namespace = store.namespace(&scorer.prompted_by(&model::identity(&path, &self.models.join(".identities"))?))?;
        store.used(namespace, name)?;
        let began = Instant::now();
        let (mut chat, mut told, mut forward_tokens, mut from_cache) = (None, Vec::new(), 0, 0);
        for (i, text) in self.sample.texts().enumerate() {
            let key = blake3::hash(text.as_bytes());
            if let Some(scores) = store.lookup(&key, &[namespace])?.get(0) {
                told.push(scores.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect());
                from_cache += 1;
                continue;
            }
            let path = path.clone();
            let chat = match &chat {
                Some(chat) => Arc::clone(chat),
                None => Arc::clone(chat.insert(Arc::new(blocking(move || Chat::open(&path)).await??))),
            };
            let sample = Arc::clone(&self.sample);
            let ask = move || {
                let (text, tokens) = (sample.texts().nth(i).unwrap_or_default(), &sample.documents[i].tokens);
                let edges = find_edges(text, tokens, policy);
                prompted(&chat, text, tokens, &edges.edges.iter().filter(|e| e.is_candidate()).collect::<Vec<_>>())
            };
            let (said, tokens) = blocking(ask).await??;
            forward_tokens += tokens;
            let said: Vec<f32> = said.into_iter().map(|score| score.unwrap_or(f32::NAN)).collect();
            store.insert(&key, &[(namespace, &said.iter().flat_map(|s| s.to_le_bytes()).collect::<Vec<u8>>())])?;
            told.push(said);
            tracing::info!(event = "prompted", document = i + 1, of = self.sample.documents.len(), "asked");
        }
        store.flush()?;
        let said = told.iter().flatten();
        let omitted = said.clone().filter(|s| s.is_nan()).count() as f64 / said.count().max(1) as f64;
        let own = |i: usize, _: &str, _: &[&Edge]| told[i].iter().map(|score| if score.is_nan() { OMITTED } else { *score }).collect();
        let documents = scored(&self.sample, policy, own);
        let seconds = began.elapsed().as_secs_f64();
        Ok(Judged { documents, forward_tokens, seconds, from_cache, omitted: Some(omitted), ..judged })
    }
}

/// The documents of a sample, with what `own` gives to the candidates of each.
fn scored(sample: &Sample, policy: EdgePolicy, own: impl Fn(usize, &str, &[&Edge]) -> Vec<f32>) -> Vec<Scored> {
    let of = |(i, (text, gold)): (usize, (&str, &Gold))| {
        let edges = find_edges(text, &gold.tokens, policy);
        let own = own(i, text, &edges.edges.iter().filter(|e| e.is_candidate()).collect::<Vec<_>>());
        Scored::of_scores(blake3::hash(text.as_bytes()), edges, &own, &percentiles(&own))
    };
    sample.texts().zip(&sample.documents).enumerate().map(of).collect()
}

/// Reads all documents with their true units.
async fn gather(pipeline: &Pipeline, options: &EvalOptions, tokenizer: &Tokenizer) -> Result<Sample, RunError> {
    let mut pipeline = pipeline.clone();
    let columns = std::iter::once(options.gold.clone()).chain(options.domain.clone().filter(|d| *d != options.gold)).collect();
    pipeline.input.pass_through = PassThrough::Columns(columns);
    let mut input = Rows::open(&pipeline, options.limit)?;
    let (plan, names) = (Arc::clone(&input.plan), input.names.clone());
    let mut sample = Sample { batches: Vec::new(), documents: Vec::new() };
    while let Some((file, batch)) = input.next().await? {
        let mut places = Vec::new();
        for (place, text) in batch.texts().enumerate() {
            let bad = |reason: String| IoError::BadRow { file: names[file].clone(), row: batch.rows[place], reason };
            let text = match text {
                TextCell::Null | TextCell::Text("") => continue,
                TextCell::Bad(reason) => return Err(bad(reason.to_owned()).into()),
                TextCell::Text(text) => text,
            };
            let starts = starts(batch.columns.column(plan.service), place).map_err(|reason| bad(format!("{}: {reason}", options.gold)))?;
            let tokens = tokenizer.encode(text).map_err(|e| bad(e.to_string()))?;
            let boundaries = boundaries(text, &tokens, &starts).map_err(|reason| bad(format!("{}: {reason}", options.gold)))?;
            let domain = match &options.domain {
                None => String::new(),
                Some(_) => name(batch.columns.columns().last().unwrap_or(batch.columns.column(plan.service)), place)?,
            };
            let id = input.id(file, &batch, place)?;
            sample.documents.push(Gold { id, domain, tokens, boundaries });
            places.push(place);
        }
        sample.batches.push((Arc::new(batch), places));
    }
    if sample.documents.is_empty() {
        return Err(IoError::Input("the input holds no document to evaluate on".into()).into());
    }
    Ok(sample)
}

/// The bytes of a cell: a list of integers, or JSON text of one.
pub(super) fn starts(column: &ArrayRef, row: usize) -> Result<Vec<u64>, String> {
    if column.is_null(row) {
        return Err("is null; every document needs the byte at which each of its units begins".into());
    }
    let negative = |v: i64| u64::try_from(v).map_err(|_| format!("holds {v}, which is no byte"));
    match column.data_type() {
        DataType::Utf8 => {
            let text = column.as_string::<i32>().value(row);
            serde_json::from_str(text).map_err(|e| format!("is {text:?}, not a JSON list of bytes: {e}"))
        }
        DataType::List(_) | DataType::LargeList(_) | DataType::FixedSizeList(..) => {
            let list = cast(&column.slice(row, 1), &DataType::new_large_list(DataType::Int64, true)).map_err(|e| e.to_string())?;
            let values = list.as_list::<i64>().value(0);
            let values = values.as_primitive::<Int64Type>();
            values.iter().map(|v| v.ok_or_else(|| "holds a null".to_owned()).and_then(negative)).collect()
        }
        other => Err(format!("holds {other}, not a list of bytes")),
    }
}

/// The byte of each token's first character that is no white space; of a token of white space alone that of the token before it (design section 2).
pub(super) fn places(text: &str, tokens: &Tokens) -> Vec<u64> {
    let mut place = 0;
    let place_of = |&(start, end): &(usize, usize)| {
        let inside = text.get(start..end).unwrap_or_default();
        if let Some(at) = inside.find(|c: char| !c.is_whitespace()) {
            place = place.max((start + at) as u64);
        }
        place
    };
    tokens.spans.iter().map(place_of).collect()
}

/// The first token of every unit but the first: a token belongs to the unit that holds its place.
pub(super) fn boundaries(text: &str, tokens: &Tokens, starts: &[u64]) -> Result<Vec<u32>, String> {
    let places = places(text, tokens);
    let inner: Vec<u64> = starts.iter().copied().skip_while(|s| *s == 0).collect();
    let token = |&start: &u64| match places.partition_point(|p| *p < start) as u32 {
        token if token == 0 || token as usize >= places.len() => {
            Err(format!("a unit at byte {start} holds no token of the document ({} bytes)", text.len()))
        }
        token => Ok(token),
    };
    let found = inner.iter().map(token).collect::<Result<Vec<u32>, _>>()?;
    match found.windows(2).position(|pair| pair[0] >= pair[1]) {
        Some(i) => Err(format!("the units at bytes {} and {} are not in order, or begin in one token", inner[i], inner[i + 1])),
        None => Ok(found),
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{Int32Array, ListArray, StringArray};
    use arrow::datatypes::Int32Type;

    use super::*;

    #[test]
    fn units_begin_with_the_token_that_holds_their_first_character() {
        // "ab", " cd", " ", " e".
        let text = "ab cd  e";
        let tokens = Tokens { ids: vec![0; 4], spans: vec![(0, 2), (2, 5), (5, 6), (6, 8)] };
        assert_eq!(boundaries(text, &tokens, &[0, 3]), Ok(vec![1]));
        assert_eq!(boundaries(text, &tokens, &[0, 7]), Ok(vec![3]));
        assert_eq!(boundaries(text, &tokens, &[3, 7]), Ok(vec![1, 3]), "a first unit need not be told");
        assert_eq!(boundaries(text, &tokens, &[0]), Ok(vec![]));
        assert!(boundaries(text, &tokens, &[0, 8]).unwrap_err().contains("byte 8 holds no token"));
        assert!(boundaries(text, &tokens, &[0, 7, 3]).unwrap_err().contains("not in order"));
        assert!(boundaries(text, &tokens, &[0, 3, 3]).unwrap_err().contains("not in order"));
    }

    #[test]
    fn starts_are_lists_or_json() {
        let list: ArrayRef =
            Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>([Some(vec![Some(0), Some(7)]), None, Some(vec![Some(-1)])]));
        assert_eq!(starts(&list, 0), Ok(vec![0, 7]));
        assert!(starts(&list, 1).unwrap_err().contains("null") && starts(&list, 2).unwrap_err().contains("-1"));
        let text: ArrayRef = Arc::new(StringArray::from(vec!["[0, 9]", "x"]));
        assert_eq!(starts(&text, 0), Ok(vec![0, 9]));
        assert!(starts(&text, 1).unwrap_err().contains("JSON list"));
        let other: ArrayRef = Arc::new(Int32Array::from(vec![1]));
        assert!(starts(&other, 0).unwrap_err().contains("Int32"));
    }

    #[test]
    fn sums_are_tried_with_every_weight_but_of_the_first() {
        let Ok(Method::Readouts(terms)) = "rr+lr+embed".parse() else { panic!() };
        let all = sums(&terms);
        assert_eq!(all.len(), 16);
        assert!(all.contains(&"rr+0.5lr+2embed".parse().unwrap()) && all.contains(&"rr+lr+embed".parse().unwrap()));
    }
}
