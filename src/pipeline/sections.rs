//! The `sections` command: cuts of ordinary documents, at the ends of their sentences, beside their sections (paper appendix A.4). A control: where sentences and
//! subjects can be seen, removing a prefix is no better than what is in use.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Int64Type};
use rayon::prelude::*;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::sync::watch;

use super::documents::{Scorer, blocking};
use super::evaluate::places;
use super::run::{Rows, stopped};
use super::spec::{PassThrough, Pipeline, Preset, ReadoutWord};
use super::{RunError, Stop};
use crate::eval::{Counts, Interval, Measure, Strata, compare, lexical_cohesion, resample};
use crate::io::IoError;
use crate::score::{Comparator, Document, PassiveScratch, Readout, score_at};
use crate::text::Tokenizer;

/// Sentences on each side that the embedding boundary and lexical cohesion compare.
const SENTENCES: usize = 3;

/// What is compared, on what.
pub struct SectionOptions {
    /// Folder of models.
    pub models: PathBuf,
    /// Documents that thresholds are chosen on: a file, folder or glob.
    pub calibration: String,
    /// Documents to judge at most.
    pub limit: Option<u64>,
    /// Times that documents are drawn again.
    pub resamples: usize,
    /// Seed of what is drawn.
    pub seed: u64,
    /// Says when to stop.
    pub stop: watch::Receiver<Option<Stop>>,
}

/// What a method does.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct SectionRow {
    /// The method.
    pub method: String,
    /// The score above which it cuts, or, of `uniform`, the sentences of a section; none of `no_cut`.
    pub threshold: Option<f64>,
    /// P_k in sentences, pooled over windows; lower is better.
    pub pk: Interval,
    /// Less that of the embedding boundary, the same documents drawn.
    pub pk_less_embed: Option<Interval>,
    /// Sections that it makes of a document.
    pub sections: f64,
    /// F1 of exact boundaries.
    pub boundary_f1: f64,
    /// P_k if each document is cut at its best scores into as many sections as it has.
    pub pk_at_true_count: Option<f64>,
    /// F1 of exact boundaries, cut so.
    pub f1_at_true_count: Option<f64>,
    /// Mean average precision of true boundaries among sentence ends, by score.
    pub average_precision: Option<f64>,
}

/// The control.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct Sections {
    /// Documents judged.
    pub documents: usize,
    /// Their sentences.
    pub sentences: usize,
    /// Their sections.
    pub sections: usize,
    /// Documents that thresholds were chosen on.
    pub calibration: usize,
    /// Times that documents were drawn again.
    pub resamples: usize,
    /// Methods.
    pub methods: Vec<SectionRow>,
}

/// A document: its sentences joined by one space.
struct Sectioned {
    text: String,
    /// Byte at which each sentence begins.
    sentences: Vec<usize>,
    /// Sentences before each section but the first.
    boundaries: Vec<u32>,
    ids: Vec<u32>,
    /// First token of each sentence but the first.
    edges: Vec<u32>,
}

/// Of each document the scores of its internal sentence ends, by a method.
struct Scores {
    name: String,
    of: Vec<Vec<f32>>,
}

/// Compares methods on the pipeline's input, whose documents have the columns `sentences` (a list of texts) and `masses` (sentences of each section).
///
/// # Errors
/// [`RunError`], also for documents whose columns do not agree.
pub async fn sections(pipeline: &Pipeline, options: SectionOptions) -> Result<Sections, RunError> {
    let stop = stopped(options.stop.clone());
    tokio::select! { biased; reason = stop => Err(RunError::Stopped(reason)), found = control(pipeline, &options) => found }
}

async fn control(pipeline: &Pipeline, options: &SectionOptions) -> Result<Sections, RunError> {
    let mut own = super::methods::with_preset(pipeline, Preset::Paper);
    own.score.readouts = vec![ReadoutWord::Rr, ReadoutWord::Lr, ReadoutWord::Embed];
    let scorer = Arc::new(Scorer::new(&own, &options.models)?);
    let tokenizer = scorer.tokenizer().await?;
    let chosen_on = gather(
        &Pipeline { input: super::spec::Input { paths: vec![options.calibration.clone()], ..own.input.clone() }, ..own.clone() },
        None,
        &tokenizer,
    )
    .await?;
    let judged = gather(&own, options.limit, &tokenizer).await?;
    let (chosen_on, judged) = (Arc::new(chosen_on), Arc::new(judged));
    let (known, found) = (score(&scorer, &own, &chosen_on).await?, score(&scorer, &own, &judged).await?);
    let (resamples, seed, calibration) = (options.resamples, options.seed, chosen_on.len());
    let methods = {
        let judged = Arc::clone(&judged);
        blocking(move || rows(&chosen_on, &judged, &known, &found, resamples, seed)).await?
    };
    Ok(Sections {
        documents: judged.len(),
        sentences: judged.iter().map(|d| d.sentences.len()).sum(),
        sections: judged.iter().map(|d| d.boundaries.len() + 1).sum(),
        calibration,
        resamples,
        methods,
    })
}

/// A method: its name, its threshold, what it gives of each document, and its scores.
type Tried<'a> = (String, Option<f64>, Vec<Counts>, Option<&'a Scores>);

fn rows(chosen_on: &[Sectioned], judged: &[Sectioned], known: &[Scores], found: &[Scores], resamples: usize, seed: u64) -> Vec<SectionRow> {
    let mut all: Vec<Tried<'_>> = Vec::new();
    for (known, found) in known.iter().zip(found) {
        let threshold = threshold(chosen_on, known);
        let cut = |(d, scores): (&Sectioned, &Vec<f32>)| counts(d, &above(scores, threshold));
        all.push((found.name.clone(), Some(f64::from(threshold)), judged.iter().zip(&found.of).map(cut).collect(), Some(found)));
    }
    let uniform = |d: &Sectioned, every: usize| {
        counts(d, &(1..d.sentences.len() as u32).filter(|s| (*s as usize).is_multiple_of(every)).collect::<Vec<_>>())
    };
    let longest = chosen_on.iter().map(|d| d.sentences.len()).max().unwrap_or(1);
    let value = |every: usize| pooled(chosen_on.iter().map(|d| uniform(d, every)));
    let every = (1..=longest).min_by(|&a, &b| value(a).total_cmp(&value(b))).unwrap_or(1);
    all.push(("uniform".into(), Some(every as f64), judged.iter().map(|d| uniform(d, every)).collect(), None));
    all.push(("no_cut".into(), None, judged.iter().map(|d| counts(d, &[])).collect(), None));

    let draws = resample(&Strata::by_name(judged.iter().map(|_| "")), resamples, seed, <[usize]>::to_vec);
    let pk = |of: &[Counts], drawn: &[usize]| pooled(drawn.iter().map(|&i| of[i]));
    let whole: Vec<usize> = (0..judged.len()).collect();
    let base = all.iter().position(|(name, ..)| name == "embed");
    let row = |(i, (name, threshold, of, scores)): (usize, &Tried<'_>)| {
        let mut total = Counts::default();
        of.iter().for_each(|c| total += c);
        let at_true = scores.map(|scores| {
            let mut total = Counts::default();
            judged.iter().zip(&scores.of).for_each(|(d, s)| total += &counts(d, &best(s, d.boundaries.len())));
            total
        });
        let precision = scores.map(|scores| {
            let each: Vec<f64> = judged.iter().zip(&scores.of).filter_map(|(d, s)| average_precision(s, &d.boundaries)).collect();
            each.iter().sum::<f64>() / each.len() as f64
        });
        let less = base.filter(|b| *b != i).map(|base| {
            let less = |drawn: &[usize]| pk(of, drawn) - pk(&all[base].2, drawn);
            Interval::of(less(&whole), draws.iter().map(|d| less(d)))
        });
        SectionRow {
            method: name.clone(),
            threshold: *threshold,
            pk: Interval::of(pk(of, &whole), draws.iter().map(|d| pk(of, d))),
            pk_less_embed: less,
            sections: total.chunks / judged.len() as f64,
            boundary_f1: Measure::BoundaryF1.of(&total),
            pk_at_true_count: at_true.as_ref().map(|c| Measure::Pk.of(c)),
            f1_at_true_count: at_true.as_ref().map(|c| Measure::BoundaryF1.of(c)),
            average_precision: precision,
        }
    };
    all.iter().enumerate().map(row).collect()
}

/// Metrics in sentences.
fn counts(document: &Sectioned, cuts: &[u32]) -> Counts {
    compare(document.sentences.len() as u32, &document.boundaries, cuts, cuts)
}

fn pooled(counts: impl Iterator<Item = Counts>) -> f64 {
    let mut total = Counts::default();
    counts.for_each(|c| total += &c);
    Measure::Pk.of(&total)
}

/// Sentences before each cut where the score is above a threshold.
fn above(scores: &[f32], threshold: f32) -> Vec<u32> {
    (1..).zip(scores).filter(|(_, s)| **s > threshold).map(|(i, _)| i).collect()
}

/// The places of the best scores, of equal ones the earlier.
fn best(scores: &[f32], count: usize) -> Vec<u32> {
    let mut found: Vec<u32> = ranked(scores).into_iter().take(count).collect();
    found.sort_unstable();
    found
}

/// Places by falling score; edges without one come last.
fn ranked(scores: &[f32]) -> Vec<u32> {
    let worth = |i: &u32| Some(scores[*i as usize - 1]).filter(|s| !s.is_nan()).unwrap_or(f32::NEG_INFINITY);
    let mut order: Vec<u32> = (1..=scores.len() as u32).collect();
    order.sort_by(|a, b| worth(b).total_cmp(&worth(a)));
    order
}

/// The mean, over true boundaries, of the precision down to each; `None` where there are none.
fn average_precision(scores: &[f32], boundaries: &[u32]) -> Option<f64> {
    let (mut found, mut sum) = (0.0, 0.0);
    for (rank, place) in (1..).zip(ranked(scores)) {
        if boundaries.binary_search(&place).is_ok() {
            found += 1.0;
            sum += found / f64::from(rank);
        }
    }
    (!boundaries.is_empty()).then(|| sum / boundaries.len() as f64)
}

/// The threshold of lowest pooled P_k: one of the scores, or above all; of equal ones the highest.
fn threshold(documents: &[Sectioned], scores: &Scores) -> f32 {
    let mut tried: Vec<f32> = scores.of.iter().flatten().copied().filter(|s| !s.is_nan()).collect();
    tried.sort_unstable_by(f32::total_cmp);
    tried.dedup();
    let value = |threshold: f32| pooled(documents.iter().zip(&scores.of).map(|(d, s)| counts(d, &above(s, threshold))));
    tried.iter().rev().map(|&t| (value(t), t)).reduce(|best, next| if next.0 < best.0 { next } else { best }).map_or(f32::INFINITY, |b| b.1)
}

async fn score(scorer: &Arc<Scorer>, pipeline: &Pipeline, documents: &Arc<Vec<Sectioned>>) -> Result<Vec<Scores>, RunError> {
    let engine = scorer.engine().await?;
    let curves =
        futures::future::try_join_all(documents.iter().map(|d| engine.score(Document { ids: d.ids.clone(), edges: d.edges.clone() })))
            .await?;
    let (window, skip) = (pipeline.score.window(), pipeline.score.skip);
    let readout = |readout: Readout| -> Vec<Vec<f32>> {
        let of = |(d, curves): (&Sectioned, &Vec<_>)| {
            let m = |b: &u32| window.min(d.ids.len() as u32 - b);
            let score = |(b, curves): (&u32, &crate::score::EdgeCurves)| score_at(readout, curves.get(readout), m(b), skip, window);
            d.edges.iter().zip(curves).map(score).collect()
        };
        documents.iter().zip(&curves).map(of).collect()
    };
    let mut all = vec![Scores { name: "rr".into(), of: readout(Readout::Rr) }, Scores { name: "lr".into(), of: readout(Readout::Lr) }];
    let (boundary, passive, shared) = (scorer.boundary().await?, scorer.passive().await?, Arc::clone(documents));
    let others = blocking(move || {
        let embed = shared.iter().map(|d| boundary.scores(&d.text, &sides(d))).collect::<Result<Vec<_>, _>>()?;
        let which = [Comparator::ResidualJump, Comparator::LocalHiddenDistance];
        let of = |scratch: &mut PassiveScratch, d: &Sectioned| passive.scores(&d.ids, &d.edges, &which, scratch);
        let passive = shared.par_iter().map_init(PassiveScratch::default, of).collect::<Result<Vec<_>, _>>()?;
        let mut all = vec![Scores { name: "embed".into(), of: embed }];
        for (c, which) in which.iter().enumerate() {
            all.push(Scores { name: which.as_str().into(), of: passive.iter().map(|p| p[c].clone()).collect() });
        }
        let apart = |d: &Sectioned| {
            let score = |(left, right): (Range<usize>, Range<usize>)| match lexical_cohesion(&d.text[left], &d.text[right]) {
                Some(cohesion) => 1.0 - cohesion as f32,
                None => f32::NAN,
            };
            sides(d).into_iter().map(score).collect()
        };
        all.push(Scores { name: "lexical_cohesion".into(), of: shared.iter().map(apart).collect() });
        Ok::<_, RunError>(all)
    });
    all.extend(others.await??);
    Ok(all)
}

/// Of each internal sentence end the bytes of the sentences before and after it.
fn sides(d: &Sectioned) -> Vec<(Range<usize>, Range<usize>)> {
    let start = |s: usize| d.sentences.get(s).copied().unwrap_or(d.text.len());
    (1..d.sentences.len()).map(|s| (start(s.saturating_sub(SENTENCES))..start(s), start(s)..start(s + SENTENCES))).collect()
}

/// Reads documents of two sentences or more.
async fn gather(pipeline: &Pipeline, limit: Option<u64>, tokenizer: &Tokenizer) -> Result<Vec<Sectioned>, RunError> {
    let mut pipeline = pipeline.clone();
    // There is no text column: the sentences are the text.
    pipeline.input.columns = [("masses".to_owned(), "List(Int64)".to_owned()), ("sentences".to_owned(), "List(Utf8)".to_owned())].into();
    pipeline.input.text_column = pipeline.input.id_column.clone().unwrap_or_else(|| "id".into());
    pipeline.input.pass_through = PassThrough::Columns(vec!["sentences".into(), "masses".into()]);
    let mut input = Rows::open(&pipeline, limit)?;
    let (plan, names) = (Arc::clone(&input.plan), input.names.clone());
    let mut documents = Vec::new();
    while let Some((file, batch)) = input.next().await? {
        for place in 0..batch.rows.len() {
            let bad = |reason: String| IoError::BadRow { file: names[file].clone(), row: batch.rows[place], reason };
            let (sentences, masses) = (batch.columns.column(plan.service), batch.columns.column(plan.service + 1));
            let sentences = texts(sentences, place).map_err(|e| bad(format!("sentences {e}")))?;
            let masses = integers(masses, place).map_err(|e| bad(format!("masses {e}")))?;
            if masses.iter().sum::<i64>() != sentences.len() as i64 || masses.iter().any(|m| *m < 1) {
                return Err(bad(format!("its masses {masses:?} do not add up to its {} sentences", sentences.len())).into());
            }
            if sentences.len() < 2 {
                continue;
            }
            documents.push(sectioned(&sentences, &masses, tokenizer).map_err(bad)?);
        }
    }
    if documents.is_empty() {
        return Err(IoError::Input(format!("{} holds no document of two sentences", pipeline.input.paths.join(", "))).into());
    }
    Ok(documents)
}

fn sectioned(sentences: &[String], masses: &[i64], tokenizer: &Tokenizer) -> Result<Sectioned, String> {
    let mut text = String::new();
    let mut starts = Vec::with_capacity(sentences.len());
    for sentence in sentences {
        if !text.is_empty() {
            text.push(' ');
        }
        starts.push(text.len());
        text += sentence.trim();
    }
    let tokens = tokenizer.encode(&text).map_err(|e| e.to_string())?;
    let places = places(&text, &tokens);
    let last = (tokens.ids.len() as u32).saturating_sub(1).max(1);
    // Ascending, though a sentence of no token would share the next one's.
    let edges = starts[1..].iter().map(|&start| (places.partition_point(|p| *p < start as u64) as u32).clamp(1, last)).collect();
    let mut boundaries: Vec<u32> = masses
        .iter()
        .scan(0, |sum, m| {
            Some({
                *sum += *m as u32;
                *sum
            })
        })
        .collect();
    boundaries.pop();
    Ok(Sectioned { text, sentences: starts, boundaries, ids: tokens.ids, edges })
}

fn texts(column: &ArrayRef, row: usize) -> Result<Vec<String>, String> {
    let list = list(column, row, DataType::Utf8)?;
    Ok(list.as_string::<i32>().iter().map(|s| s.unwrap_or_default().to_owned()).collect())
}

fn integers(column: &ArrayRef, row: usize) -> Result<Vec<i64>, String> {
    let list = list(column, row, DataType::Int64)?;
    Ok(list.as_primitive::<Int64Type>().iter().map(Option::unwrap_or_default).collect())
}

fn list(column: &ArrayRef, row: usize, kind: DataType) -> Result<ArrayRef, String> {
    if column.is_null(row) {
        return Err("is null".into());
    }
    let list = cast(&column.slice(row, 1), &DataType::new_large_list(kind, true)).map_err(|e| e.to_string())?;
    Ok(list.as_list::<i64>().value(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(sentences: usize, boundaries: &[u32]) -> Sectioned {
        Sectioned { text: String::new(), sentences: vec![0; sentences], boundaries: boundaries.to_vec(), ids: vec![], edges: vec![] }
    }

    #[test]
    fn the_threshold_is_that_of_the_lowest_pk() {
        let documents = [document(8, &[4])];
        let scores = Scores { name: String::new(), of: vec![vec![0.1, 0.2, 0.5, 0.9, 0.3, f32::NAN, 0.2]] };
        let found = threshold(&documents, &scores);
        assert_eq!((found, above(&scores.of[0], found)), (0.5, vec![4]));
        // Where every cut is wrong, none is made.
        let wrong = Scores { name: String::new(), of: vec![vec![0.9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]] };
        assert!(above(&wrong.of[0], threshold(&[document(8, &[])], &wrong)).is_empty());
    }

    #[test]
    fn average_precision_by_hand() {
        // Ranks: sentence 2, 4, 1, 3; the true ones are at ranks 1 and 3.
        let scores = [0.3, 0.9, f32::NAN, 0.5];
        assert_eq!(ranked(&scores), [2, 4, 1, 3]);
        assert_eq!(average_precision(&scores, &[1, 2]), Some((1.0 + 2.0 / 3.0) / 2.0));
        assert_eq!((best(&scores, 2), average_precision(&scores, &[])), (vec![2, 4], None));
    }
}
