//! The `view` and `show` commands: documents with their scores and chunks, as a [`Report`].

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arrow::array::{Array, AsArray};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Float32Type, Int32Type};
use arrow::util::display::array_value_to_string;
use tokio::sync::watch;

use super::chunks::{Chunks, Judge, Prepared};
use super::documents::{DocState, Need, Scored, Scorer};
use super::evaluate::{boundaries, starts};
use super::operator::{Operator, limits};
use super::run::{Rows, stopped};
use super::spec::{Objective, PassThrough, PassThroughWord, Pipeline};
use super::summary::Lengths;
use super::{RunError, Stop};
use crate::io::{IoError, TextCell};
use crate::report::{Corpus, Page, PageEdges, Program, Report};
use crate::segment::Limits;

/// What is looked at.
pub struct ViewOptions {
    /// Folder of models.
    pub models: PathBuf,
    /// Column that holds the byte at which each true unit begins.
    pub gold: Option<String>,
    /// The one document that is looked at, by its id.
    pub document: Option<String>,
    /// Rows to read at most.
    pub limit: Option<u64>,
    /// Says when to stop.
    pub stop: watch::Receiver<Option<Stop>>,
}

/// Cuts the pipeline's documents as `run` does and shows them.
///
/// # Errors
/// [`RunError`], also if the document that is asked for is not there.
pub async fn view(pipeline: &Pipeline, options: ViewOptions) -> Result<Report, RunError> {
    if pipeline.segment.target_mean_tokens.is_some() {
        let reason = "looks at a penalty; give the one that the run found (its summary has it) with --set segment.penalty=...";
        return Err(IoError::Input(format!("segment.target_mean_tokens: a view {reason}")).into());
    }
    let stop = stopped(options.stop.clone());
    tokio::select! { biased; reason = stop => Err(RunError::Stopped(reason)), found = documents(pipeline, &options) => found }
}

async fn documents(pipeline: &Pipeline, options: &ViewOptions) -> Result<Report, RunError> {
    let mut pipeline = pipeline.clone();
    pipeline.input.pass_through = PassThrough::Columns(options.gold.iter().cloned().collect());
    let scorer = Arc::new(Scorer::new(&pipeline, &options.models)?);
    let tokenizer = if options.gold.is_some() { Some(scorer.tokenizer().await?) } else { None };
    let mut input = Rows::open(&pipeline, options.limit)?;
    let (plan, names) = (Arc::clone(&input.plan), input.names.clone());
    let operator = Operator::with_plan(&pipeline, Arc::clone(&scorer), Arc::clone(&plan), pipeline.segment.penalty())?;
    let (limits, judge) = (limits(&pipeline), Judge::new(&pipeline));
    let mut program = program(&pipeline, &judge, limits);
    let penalties: Vec<f64> = sweep_penalties(&program).collect();
    let mut sweep = vec![(0_u64, 0_u64); penalties.len()];
    let mut pages: Vec<Page> = Vec::new();
    while let Some((file, mut batch)) = input.next().await? {
        let ids: Vec<String> = (0..batch.rows.len()).map(|place| input.id(file, &batch, place)).collect::<Result<_, _>>()?;
        if let Some(wanted) = &options.document {
            if !ids.contains(wanted) {
                continue;
            }
            let mut place = 0;
            batch.keep_texts(|_| {
                place += 1;
                ids[place - 1] == *wanted
            });
        }
        let batch = Arc::new(batch);
        let states = scorer.resolve(&batch, Need::Cuttable(limits)).await?;
        for (place, state) in states.into_iter().enumerate() {
            let bad = |reason: String| IoError::BadRow { file: names[file].clone(), row: batch.rows[place], reason };
            let (document, text) = match (state, batch.text(place)) {
                (DocState::Ready(document), TextCell::Text(text)) => (document, text),
                (DocState::Bad(reason), _) => return Err(bad(reason).into()),
                (DocState::NotCached, _) => return Err(RunError::NotCached { row: batch.rows[place], documents: 1 }),
                _ => continue,
            };
            let prepared = Prepared::new(&document, &judge);
            let chunks = operator.cut_document(&document, &batch, place).map_err(bad)?;
            if options.document.is_none() {
                for ((lengths, _), (chunks, tokens)) in prepared.sweep(&limits, &penalties).iter().zip(&mut sweep) {
                    *chunks += lengths.len() as u64;
                    *tokens += u64::from(document.tokens);
                }
            }
            let mut page = page(ids[place].clone(), text, &document, &prepared, &chunks);
            if let (Some(tokenizer), Some(gold)) = (&tokenizer, &options.gold) {
                let fail = |reason: String| bad(format!("{gold}: {reason}"));
                let starts = starts(batch.columns.column(plan.service), place).map_err(fail)?;
                let tokens = tokenizer.encode(text).map_err(|e| bad(e.to_string()))?;
                page.gold = Some(boundaries(text, &tokens, &starts).map_err(fail)?);
            }
            pages.push(page);
        }
        if options.document.is_some() && !pages.is_empty() {
            break;
        }
    }
    scorer.store().flush()?;
    if let (Some(wanted), true) = (&options.document, pages.is_empty()) {
        let what = if plan.id.is_some() {
            "no document with text has this id"
        } else {
            "without input.id_column a document is called <path>#<row>"
        };
        return Err(IoError::Input(format!("document {wanted:?} is not in the input: {what}")).into());
    }
    let mut corpus = of_pages(&pages);
    let mean = |&(chunks, tokens): &(u64, u64)| if chunks == 0 { 0.0 } else { tokens as f64 / chunks as f64 };
    corpus.sweep = penalties.iter().zip(&sweep).map(|(&penalty, counts)| (penalty, counts.0, mean(counts))).collect();
    program.penalty = pipeline.segment.penalty();
    let counters = &scorer.counters;
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed).to_string();
    let unit = if program.damage { " nats" } else { "" };
    let mut add = |name: &str, value: String| corpus.figures.push((name.into(), value));
    add("penalty", format!("{}{unit}", program.penalty));
    add("model", scorer.model_name().to_owned());
    add("documents from the cache", count(&counters.from_cache));
    add("documents scored", count(&counters.scored));
    add("documents that needed no scores", count(&counters.not_needed));
    if let Some(stats) = scorer.engine_stats().filter(|s| s.busy_seconds > 0.0) {
        add("tokens through the model", stats.forward_tokens.to_string());
        add("source tokens/s", format!("{:.0}", stats.source_tokens as f64 / stats.busy_seconds));
    }
    // Counts that are fixed have no penalty to try.
    let fixed = pipeline.segment.count.is_some() || pipeline.segment.count_column.is_some();
    let title = if names.len() > 3 { format!("{} files", names.len()) } else { names.join(", ") };
    Ok(Report { title, program: Some(program).filter(|_| !fixed), corpus, documents: pages })
}

fn program(pipeline: &Pipeline, judge: &Judge, limits: Limits) -> Program {
    let damage = pipeline.segment.objective == Objective::ChunkDamage;
    let penalty = pipeline.segment.penalty();
    Program {
        damage,
        penalty,
        penalties: if damage { (penalty.min(0.0), (2.0 * penalty).max(80.0), 0.5) } else { (penalty.min(0.5), penalty.max(1.1), 0.005) },
        target: limits.target,
        min: limits.min,
        max: limits.max,
        length_weight: limits.length_weight,
        knots: match judge {
            Judge::Damage(knots) => knots.places().to_vec(),
            Judge::Percentile => Vec::new(),
        },
    }
}

/// Penalties of the curve: 31 from the first to the last.
fn sweep_penalties(program: &Program) -> impl Iterator<Item = f64> + use<> {
    let (first, last, _) = program.penalties;
    (0..=30).map(move |i| ((first + (last - first) * f64::from(i) / 30.0) * 1e6).round() / 1e6)
}

fn page(id: String, text: &str, document: &Scored, prepared: &Prepared<'_>, chunks: &Chunks) -> Page {
    let mut edges = PageEdges::default();
    // UTF-16 units are counted on from edge to edge.
    let (mut byte, mut units) = (0, 0_u32);
    for (edge, curve) in prepared.edges(document) {
        let to = edge.byte.0 as usize;
        units += text.get(byte..to).map_or(0, |part| part.encode_utf16().count() as u32);
        byte = to;
        edges.at.push(units);
        edges.token.push(edge.token.0);
        edges.kind.push(edge.kind.as_str());
        if let Some((curve, scored)) = curve {
            edges.curve.push(curve.to_vec());
            edges.scored.push(scored);
        }
    }
    let number = |token: u32| edges.token.binary_search(&token).ok();
    for (score, utility) in prepared.values(document) {
        edges.score.push(score);
        edges.utility.push(utility);
    }
    edges.damage = vec![None; edges.token.len()];
    let cuts: Vec<usize> = chunks.cuts.iter().filter_map(|cut| number(cut.token.0)).collect();
    for (cut, &edge) in chunks.cuts.iter().zip(&cuts) {
        edges.damage[edge] = cut.damage;
    }
    Page { id, text: text.to_owned(), tokens: document.tokens, edges, cuts, relaxed: chunks.relaxed, gold: None }
}

/// Shows chunks that `run` has written: a file, or a folder of them.
///
/// # Errors
/// [`RunError`], also for files that hold no chunks.
pub async fn view_chunks(path: &Path, limit: Option<u64>, stop: watch::Receiver<Option<Stop>>) -> Result<Report, RunError> {
    let stop = stopped(stop);
    tokio::select! { biased; reason = stop => Err(RunError::Stopped(reason)), found = chunk_rows(path, limit) => found }
}

async fn chunk_rows(path: &Path, limit: Option<u64>) -> Result<Report, RunError> {
    let mut pipeline = Pipeline::default();
    pipeline.input.paths = vec![path.to_string_lossy().into_owned()];
    pipeline.input.id_column = Some("doc_id".into());
    pipeline.input.pass_through = PassThrough::Word(PassThroughWord::All);
    let types = [
        ("chunk_index", "int32"),
        ("token_count", "int32"),
        ("cut_score", "float32"),
        ("cut_utility", "float32"),
        ("cut_damage", "float32"),
    ];
    pipeline.input.columns = types.map(|(name, kind)| (name.to_owned(), kind.to_owned())).into();
    let mut input = Rows::open(&pipeline, None)?;
    let mut pages: Vec<Page> = Vec::new();
    let most = limit.map_or(usize::MAX, |limit| limit as usize);
    'files: while let Some((_, batch)) = input.next().await? {
        let columns = &batch.columns;
        let column = |name: &str, kind: DataType| columns.column_by_name(name).map(|column| cast(column, &kind)).transpose();
        let missing = |what: &str| {
            let advice = "it holds no chunks of right-reset; to look at documents give a pipeline file (.toml)";
            RunError::from(IoError::Input(format!("{}: {what}: {advice}", path.display())))
        };
        let need = |name: &str| column(name, DataType::Int32)?.ok_or_else(|| missing(&format!("there is no column {name}")));
        let (index, tokens) = (need("chunk_index")?, need("token_count")?);
        let (index, tokens) = (index.as_primitive::<Int32Type>(), tokens.as_primitive::<Int32Type>());
        let floats = |name: &str| column(name, DataType::Float32);
        let (score, utility, damage) = (floats("cut_score")?, floats("cut_utility")?, floats("cut_damage")?);
        for place in 0..batch.rows.len() {
            let TextCell::Text(text) = batch.text(place) else { continue };
            if index.is_null(place) || tokens.is_null(place) {
                return Err(missing(&format!("row {} has no chunk_index or token_count", batch.rows[place])));
            }
            if index.value(place) == 0 {
                if pages.len() == most {
                    break 'files;
                }
                pages.push(Page { id: array_value_to_string(columns.column(0), place)?, ..Page::default() });
            }
            let Some(page) = pages.last_mut() else {
                return Err(IoError::Input(format!("{}: the first row is not the first chunk of its document", path.display())).into());
            };
            if index.value(place) > 0 {
                let value = |column: &Option<arrow::array::ArrayRef>| {
                    let column = column.as_ref()?.as_primitive::<Float32Type>();
                    (!column.is_null(place)).then(|| column.value(place))
                };
                page.cuts.push(page.edges.token.len());
                page.edges.token.push(page.tokens);
                page.edges.at.push(page.text.encode_utf16().count() as u32);
                page.edges.kind.push("");
                page.edges.score.push(value(&score));
                page.edges.utility.push(value(&utility).map(f64::from));
                page.edges.damage.push(value(&damage));
            }
            page.text.push_str(text);
            page.tokens += tokens.value(place).unsigned_abs();
        }
    }
    let corpus = of_pages(&pages);
    let title = path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned());
    Ok(Report { title, program: None, corpus, documents: pages })
}

/// Figures that pages alone give.
fn of_pages(pages: &[Page]) -> Corpus {
    let mut lengths = Vec::new();
    let (mut scores, mut cut_scores) = (Vec::new(), Vec::new());
    let mut counted = Lengths::default();
    for page in pages {
        let ends = page.cuts.iter().map(|&cut| page.edges.token[cut]).chain([page.tokens]);
        lengths.extend(ends.scan(0, |start, end| Some(end - std::mem::replace(start, end))));
        cut_scores.extend(page.cuts.iter().filter_map(|&cut| page.edges.score[cut]));
        scores.extend(page.edges.score.iter().flatten());
    }
    lengths.iter().for_each(|tokens| counted.add(*tokens));
    let counts = counted.counts();
    let tokens: u64 = pages.iter().map(|page| u64::from(page.tokens)).sum();
    let figures = [
        ("documents", pages.len().to_string()),
        ("tokens", tokens.to_string()),
        ("chunks", counts.count.to_string()),
        ("tokens of a chunk, mean", format!("{:.1}", counts.mean)),
        ("5th, 50th and 95th percentile", format!("{}, {}, {}", counts.p5, counts.p50, counts.p95)),
        ("documents for which a limit gave way", pages.iter().filter(|page| page.relaxed).count().to_string()),
    ];
    let figures = figures.map(|(name, value)| (name.to_owned(), value)).to_vec();
    Corpus { figures, lengths, scores, cut_scores, sweep: Vec::new() }
}
