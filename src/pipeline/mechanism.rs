//! The `mechanism` command: whether the edges that a method cuts at are those where the removed prefix matters least to the model's predictions
//! (paper section 5 and appendix A.5).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{ArrayRef, LargeStringArray, RecordBatch};
use rayon::prelude::*;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::sync::watch;

use super::documents::{DocState, Need, Scored, Scorer, blocking};
use super::evaluate::candidates;
use super::run::{Rows, name, stopped};
use super::spec::{PassThrough, Pipeline, Preset, ReadoutWord};
use super::{RunError, Stop};
use crate::eval::{Interval, Strata, resample};
use crate::io::{ColumnPlan, IoError, SourceBatch, TextCell};
use crate::model::Scratch;
use crate::score::{Comparator, PassiveScratch, Readout, rr_by_layer, score_at, surface};
use crate::segment::{Cut, Limits, fixed_count, percentiles};
use crate::text::{Edge, Tokenizer};

/// Windows that are scored, and those that they are judged over; all are places where curves are kept.
const WINDOWS: [u32; 6] = [8, 16, 24, 48, 64, 96];

/// The window of everything but the window sweep.
const WINDOW: u32 = 24;

/// What is studied.
pub struct MechanismOptions {
    /// Folder of models.
    pub models: PathBuf,
    /// Column that names the source; passages of a source are drawn again together.
    pub source: Option<String>,
    /// Passages of each row.
    pub passages: usize,
    /// Tokens of a passage.
    pub tokens: usize,
    /// Rows to read at most.
    pub limit: Option<u64>,
    /// Reset prefixes beside none.
    pub prefixes: Vec<String>,
    /// Times that sources are drawn again.
    pub resamples: usize,
    /// Seed of the random method and of what is drawn.
    pub seed: u64,
    /// Says when to stop.
    pub stop: watch::Receiver<Option<Stop>>,
}

/// The margin of a way to choose cuts.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct Margin {
    /// The way.
    pub name: String,
    /// M_KL (equation 5), in nats: mean divergence of the edges left alone less that of the cuts, averaged over passages.
    pub margin: Interval,
    /// RR's margin less this one, source by source drawn alike.
    pub rr_less_this: Option<Interval>,
}

/// A cell of the window sweep.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct WindowCell {
    /// Readout that the cuts are chosen by.
    pub readout: String,
    /// Its window.
    pub scored: u32,
    /// Window of the divergence that they are judged by; 0 for tokens 25 to 96 alone, which a score of 24 tokens has not seen.
    pub judged: u32,
    /// The margin.
    pub margin: Interval,
}

/// A reset prefix.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct PrefixRow {
    /// As `score.reset_prefix` has it.
    pub prefix: String,
    /// Margin of cuts by RR with the prefix, judged by the divergence with it.
    pub matched: Interval,
    /// The same cuts judged by the divergence without a prefix.
    pub crossed: Interval,
}

/// The study.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct Mechanism {
    /// The model.
    pub model: String,
    /// Sources, drawn again as clusters.
    pub sources: usize,
    /// Passages.
    pub passages: usize,
    /// Candidate edges with all scores.
    pub edges: usize,
    /// Cuts of each way.
    pub cuts: usize,
    /// Times that sources were drawn again.
    pub resamples: usize,
    /// Readouts and comparators.
    pub methods: Vec<Margin>,
    /// RR at each layer from 0.
    pub layers: Vec<Margin>,
    /// RR and LR at each window, judged over each.
    pub windows: Vec<WindowCell>,
    /// Reset prefixes.
    pub prefixes: Vec<PrefixRow>,
}

/// A passage: edges that have every score, and how they are cut.
struct Passage {
    /// Number of each among the candidates.
    number: Vec<usize>,
    token: Vec<u32>,
    tokens: u32,
    chunks: u32,
}

impl Passage {
    /// Which of the edges a score would cut at: exactly as many chunks as the passage has targets, by the program of equation 4.
    fn cut(&self, scores: &[f32], limits: &Limits) -> Vec<usize> {
        let utilities = percentiles(scores);
        let cuts: Vec<Cut> =
            self.token.iter().zip(utilities).map(|(&token, u)| Cut { token, utility: Some(if u.is_nan() { 0.0 } else { u }) }).collect();
        fixed_count(&cuts, self.tokens, limits, self.chunks).map(|s| s.cuts).unwrap_or_default()
    }
}

/// Equation 5: the mean of `divergence` over the edges that are not cut, less that over the cuts.
fn margin(divergence: &[f64], cuts: &[usize]) -> f64 {
    let (mut cut, mut left) = ((0.0, 0.0), (0.0, 0.0));
    for (i, d) in divergence.iter().enumerate() {
        let sum = if cuts.binary_search(&i).is_ok() { &mut cut } else { &mut left };
        *sum = (sum.0 + d, sum.1 + 1.0);
    }
    left.0 / left.1 - cut.0 / cut.1
}

/// Studies a corpus: what `right-reset mechanism` prints.
///
/// # Errors
/// [`RunError`], also if no source is long enough for a passage.
pub async fn mechanism(pipeline: &Pipeline, options: MechanismOptions) -> Result<Mechanism, RunError> {
    let stop = stopped(options.stop.clone());
    tokio::select! { biased; reason = stop => Err(RunError::Stopped(reason)), found = study(pipeline, &options) => found }
}

/// The pipeline of one way to reset.
fn variant(own: &Pipeline, window: u32, prefix: &str) -> Pipeline {
    let mut found = super::methods::with_preset(own, Preset::Paper);
    found.score.readouts = vec![ReadoutWord::Rr, ReadoutWord::Lr, ReadoutWord::Kl];
    found.score.window = Some(window);
    found.score.reset_prefix = prefix.to_owned();
    found
}

async fn study(pipeline: &Pipeline, options: &MechanismOptions) -> Result<Mechanism, RunError> {
    let limits = Limits { length_weight: 0.02, ..super::operator::limits(pipeline) };
    let long = *WINDOWS.iter().max().unwrap_or(&WINDOW);
    let own = variant(pipeline, long, "none");
    own.validate()?;
    let scorer = Arc::new(Scorer::new(&own, &options.models)?);
    let tokenizer = scorer.tokenizer().await?;
    let (texts, sources) = passages(pipeline, options, &tokenizer).await?;
    let batch = Arc::new(of_texts(&texts)?);
    let scored = score(&scorer, &batch).await?;
    let (name, skip) = (scorer.model_name().to_owned(), own.score.skip);
    drop(scorer);

    // Scores of every readout at a horizon, of all candidates.
    let at = |document: &Scored, readout: Readout, horizon: u32| -> Vec<f32> {
        let after = candidates(document).map(|edge| document.tokens - edge.token.0);
        let curves = document.curves.iter().find(|c| c.readout == readout);
        after
            .enumerate()
            .map(|(i, after)| curves.map_or(f32::NAN, |c| score_at(readout, c.curves.get(i), after.min(c.reach[i]), skip, horizon)))
            .collect()
    };
    // Edges whose windows are whole: then every window and every prefix has a score of them.
    let eligible: Vec<Passage> = scored
        .iter()
        .map(|document| {
            let whole: Vec<(usize, u32)> =
                candidates(document).map(|e| e.token.0).enumerate().filter(|(_, b)| b + long <= document.tokens && *b > 8).collect();
            let chunks = (f64::from(document.tokens) / f64::from(limits.target)).round().max(2.0) as u32;
            let (number, token) = whole.into_iter().unzip();
            Passage { number, token, tokens: document.tokens, chunks }
        })
        .collect();
    let of = |p: usize, all: &[f32]| -> Vec<f32> { eligible[p].number.iter().map(|&i| all[i]).collect() };
    let divergence = |documents: &[Scored], p: usize, horizon: u32| -> Vec<f64> {
        of(p, &at(&documents[p], Readout::Kl, horizon)).into_iter().map(|score| -f64::from(score)).collect()
    };
    let every = 0..scored.len();
    let reference: Vec<Vec<f64>> = every.clone().map(|p| divergence(&scored, p, WINDOW)).collect();
    // Margins of each passage for scores of all its candidates.
    let margins = |scores: &dyn Fn(usize) -> Vec<f32>, judged: &[Vec<f64>]| -> Vec<f64> {
        every.clone().map(|p| margin(&judged[p], &eligible[p].cut(&of(p, &scores(p)), &limits))).collect()
    };

    let mut rows: Vec<(String, Vec<f64>)> = Vec::new();
    for (readout, word) in [(Readout::Rr, "rr"), (Readout::Lr, "lr"), (Readout::Kl, "kl")] {
        rows.push((word.into(), margins(&|p| at(&scored[p], readout, WINDOW), &reference)));
    }
    let (compared, by_layer) = others(pipeline, options, &texts, &scored, limits.target).await?;
    for (c, which) in Comparator::ALL.into_iter().enumerate() {
        rows.push((which.as_str().into(), margins(&|p| compared[p][c].clone(), &reference)));
    }
    let layers: Vec<(String, Vec<f64>)> =
        (0..by_layer[0].len()).map(|k| (k.to_string(), margins(&|p| by_layer[p][k].clone(), &reference))).collect();

    let mut windows = Vec::new();
    let beyond: Vec<Vec<f64>> = every
        .clone()
        .map(|p| {
            // Means over t = s+1..: back to sums, whose difference is that of the tokens between.
            let first = Readout::Kl.first(skip);
            let (near, far) = (divergence(&scored, p, WINDOW), divergence(&scored, p, long));
            let (a, b) = (f64::from(WINDOW - first), f64::from(long - first));
            near.iter().zip(far).map(|(near, far)| (far * b - near * a) / (b - a)).collect()
        })
        .collect();
    for (readout, word) in [(Readout::Rr, "rr"), (Readout::Lr, "lr")] {
        for scored_window in WINDOWS {
            let mut cell = |judged: u32, by: &[Vec<f64>]| {
                windows.push((word.to_owned(), scored_window, judged, margins(&|p| at(&scored[p], readout, scored_window), by)));
            };
            for judged in WINDOWS {
                cell(judged, &every.clone().map(|p| divergence(&scored, p, judged)).collect::<Vec<_>>());
            }
            if scored_window == WINDOW {
                cell(0, &beyond);
            }
        }
    }

    let mut prefixes = Vec::new();
    for prefix in std::iter::once("none").chain(options.prefixes.iter().map(String::as_str)) {
        let other;
        let documents = if prefix == "none" {
            &scored
        } else {
            let own = variant(pipeline, WINDOW, prefix);
            own.validate()?;
            other = score(&Arc::new(Scorer::new(&own, &options.models)?), &batch).await?;
            &other
        };
        let judged: Vec<Vec<f64>> = every.clone().map(|p| divergence(documents, p, WINDOW)).collect();
        let scores = |p: usize| at(&documents[p], Readout::Rr, WINDOW);
        prefixes.push((prefix.to_owned(), margins(&scores, &judged), margins(&scores, &reference)));
    }

    let strata = Strata::clusters(sources.iter().map(String::as_str));
    let draws = resample(&strata, options.resamples, options.seed, <[usize]>::to_vec);
    let interval = |values: &[f64]| {
        let mean = |of: &[usize]| of.iter().map(|&p| values[p]).sum::<f64>() / of.len() as f64;
        Interval::of(mean(&every.clone().collect::<Vec<_>>()), draws.iter().map(|drawn| mean(drawn)))
    };
    let rr = rows[0].1.clone();
    let row = |(name, values): (String, Vec<f64>)| {
        let less: Vec<f64> = rr.iter().zip(&values).map(|(rr, v)| rr - v).collect();
        Margin { margin: interval(&values), rr_less_this: (name != "rr").then(|| interval(&less)), name }
    };
    let mut different = sources.clone();
    different.dedup();
    Ok(Mechanism {
        model: name,
        sources: different.len(),
        passages: texts.len(),
        edges: eligible.iter().map(|p| p.number.len()).sum(),
        cuts: eligible.iter().map(|p| p.chunks as usize - 1).sum(),
        resamples: options.resamples,
        methods: rows.into_iter().map(row).collect(),
        layers: layers.into_iter().map(row).collect(),
        windows: windows
            .into_iter()
            .map(|(readout, scored, judged, v)| WindowCell { readout, scored, judged, margin: interval(&v) })
            .collect(),
        prefixes: prefixes
            .into_iter()
            .map(|(prefix, matched, crossed)| PrefixRow { prefix, matched: interval(&matched), crossed: interval(&crossed) })
            .collect(),
    })
}

async fn score(scorer: &Arc<Scorer>, batch: &Arc<SourceBatch>) -> Result<Vec<Scored>, RunError> {
    let states = scorer.resolve(batch, Need::All).await?;
    scorer.store().flush()?;
    let ready = |(state, row): (DocState, &u64)| match state {
        DocState::Ready(document) => Ok(*document),
        DocState::Bad(reason) => Err(IoError::Input(format!("passage {row}: {reason}")).into()),
        _ => Err(RunError::NotCached { row: *row, documents: 1 }),
    };
    states.into_iter().zip(&batch.rows).map(ready).collect()
}

/// Of each passage the scores of its candidates, by comparator and by layer.
type ByWay = Vec<Vec<Vec<f32>>>;

/// Comparators, and RR at every layer.
async fn others(
    own: &Pipeline,
    options: &MechanismOptions,
    texts: &[String],
    scored: &[Scored],
    target: u32,
) -> Result<(ByWay, ByWay), RunError> {
    let mut pipeline = variant(own, WINDOW, "none");
    pipeline.score.readouts = vec![ReadoutWord::Rr];
    let scorer = Scorer::new(&pipeline, &options.models)?;
    let (passive, tokenizer, spec) = (scorer.passive().await?, scorer.tokenizer().await?, scorer.spec().await?);
    let (texts, seed) = (texts.to_vec(), options.seed);
    let edges: Vec<Vec<Edge>> = scored.iter().map(|document| candidates(document).copied().collect()).collect();
    blocking(move || {
        let read: Vec<Comparator> = Comparator::ALL.into_iter().filter(|c| c.needs_model()).collect();
        let of = |(compare, sweep): &mut (PassiveScratch, Scratch), (text, edges): (&String, &Vec<Edge>)| {
            let tokens = tokenizer.encode(text).map_err(|e| IoError::Input(e.to_string()))?;
            let places: Vec<u32> = edges.iter().map(|e| e.token.0).collect();
            let mut scores = passive.scores(&tokens.ids, &places, &read, compare)?.into_iter();
            let views: Vec<&Edge> = edges.iter().collect();
            let all = Comparator::ALL.map(|which| surface(which, text, &views, target, seed).or_else(|| scores.next()).unwrap_or_default());
            let layers = rr_by_layer(passive.trunk(), &spec, &tokens.ids, &places, sweep)?;
            Ok::<_, RunError>((all.to_vec(), layers))
        };
        let found = texts.par_iter().zip(&edges).map_init(<(PassiveScratch, Scratch)>::default, of).collect::<Result<Vec<_>, _>>()?;
        Ok(found.into_iter().unzip())
    })
    .await?
}

fn of_texts(texts: &[String]) -> Result<SourceBatch, RunError> {
    let column: ArrayRef = Arc::new(LargeStringArray::from_iter_values(texts));
    let batch = RecordBatch::try_from_iter([("text", column)])?;
    Ok(ColumnPlan::of_text("text").convert(&batch, 0, u64::MAX, Path::new("(passages)"))?)
}

/// Passages of each row, begun at equal distances, at the start of a word, and the source of each.
async fn passages(pipeline: &Pipeline, options: &MechanismOptions, tokenizer: &Tokenizer) -> Result<(Vec<String>, Vec<String>), RunError> {
    let mut pipeline = pipeline.clone();
    pipeline.input.pass_through = PassThrough::Columns(options.source.iter().cloned().collect());
    let mut input = Rows::open(&pipeline, options.limit)?;
    let (plan, names) = (Arc::clone(&input.plan), input.names.clone());
    let (mut texts, mut sources, mut longest) = (Vec::new(), Vec::new(), 0);
    while let Some((file, batch)) = input.next().await? {
        for (place, text) in batch.texts().enumerate() {
            let row = batch.rows[place];
            let TextCell::Text(text) = text else { continue };
            let tokens = tokenizer.encode(text).map_err(|e| IoError::BadRow { file: names[file].clone(), row, reason: e.to_string() })?;
            longest = longest.max(tokens.ids.len());
            let source = match options.source {
                None => format!("{}#{row}", names[file]),
                Some(_) => name(batch.columns.column(plan.service), place)?,
            };
            let room = tokens.ids.len() / options.passages.max(1);
            if room < options.tokens {
                continue;
            }
            for passage in 0..options.passages {
                let (from, to) = (tokens.spans[passage * room].0, tokens.spans[passage * room + options.tokens - 1].1);
                texts.push(text.get(from..to).unwrap_or_default().trim().to_owned());
                sources.push(source.clone());
            }
        }
    }
    if texts.is_empty() {
        let reason = format!(
            "no row has {} passages of {} tokens; the longest has {longest} tokens: lower --tokens or --passages",
            options.passages, options.tokens
        );
        return Err(IoError::Input(reason).into());
    }
    Ok((texts, sources))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_margin_by_hand() {
        assert_eq!(margin(&[1.0, 0.5, 3.0, 0.25], &[1, 3]), 2.0 - 0.375);
        assert!(margin(&[1.0, 2.0], &[]).is_nan());
    }

    #[test]
    fn a_passage_has_as_many_cuts_as_asked_for() {
        let token: Vec<u32> = (1..20).map(|i| i * 10).collect();
        let passage = Passage { number: (0..19).collect(), token, tokens: 200, chunks: 4 };
        let scores: Vec<f32> = (0..19).map(|i| if [4, 9, 14].contains(&i) { 1.0 } else { 0.0 }).collect();
        let limits = Limits { target: 50, min: 10, max: 120, length_weight: 0.02 };
        assert_eq!(passage.cut(&scores, &limits), [4, 9, 14]);
    }
}
