//! The study behind the defaults (`docs/method.md`): `make study` with `RIGHT_RESET_STUDY_DATA` naming a folder that holds `records.jsonl`,
//! `streams_calibration.jsonl` and `streams_dev.jsonl`. What is scored stays in `target/study/`, so that a second run measures nothing again.
#![allow(missing_docs, clippy::print_stdout, clippy::unwrap_used, clippy::expect_used)]

mod measure;
mod streams;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, RecordBatch, StringArray};
use arrow::datatypes::Int32Type;
use futures::StreamExt;

use measure::{Doc, Found, cut, interval, judge, read_edges};
use rayon::prelude::*;
use right_reset::model::{self, Encoder};
use right_reset::pipeline;
use right_reset::pipeline::spec::Pipeline;
use right_reset::score::{Curves, Knots, Stage, reach};
use right_reset::segment::{grouped_percentiles, percentiles};
use right_reset::text::Tokenizer;
use streams::Stream;

/// The longest window of the study's own streams, and of the streams kept for the last word.
const WINDOW: u32 = 128;
const DEV_WINDOW: u32 = 192;
/// Longer than any of them.
const LONGEST: u32 = 1024;

/// What a cut at an edge damages when a chunk of so many tokens begins there.
type Damage = Box<dyn Fn(usize, u32) -> f64>;

/// Makes the damages of a document, and says what they cost in tokens through the network.
type Judge = Box<dyn Fn(&Doc) -> (Damage, f64) + Sync>;

/// A way to judge edges, with the penalties and length weights to choose from.
struct Method {
    name: String,
    of: Judge,
    settings: Vec<(f64, f64)>,
}

/// Tokens of the window of an edge, of at most `window`.
fn m(doc: &Doc, i: usize, window: u32) -> u32 {
    window.min(doc.tokens - doc.edges[i].token)
}

/// A curve of an edge, cut off after `tokens` tokens.
fn curve<'a>(doc: &'a Doc, i: usize, name: &str, tokens: u32) -> &'a [f32] {
    let Some(whole) = doc.edges[i].curves.get(name) else { return &[] };
    let after = doc.tokens - doc.edges[i].token;
    if tokens >= after { whole } else { &whole[..whole.len().min(Knots::new(LONGEST, 1).kept(tokens))] }
}

/// Damages by the curve called `name`, as far as each edge was scored (0: not at all), extrapolated by a power of the length.
fn damages(doc: &Doc, name: &str, reach: &[u32], power: f64) -> Vec<(Vec<f32>, u32, f64)> {
    (0..doc.edges.len()).map(|i| (curve(doc, i, name, reach[i]).to_vec(), m(doc, i, reach[i]), power)).collect()
}

fn read(curves: Vec<(Vec<f32>, u32, f64)>) -> impl Fn(usize, u32) -> f64 {
    let knots = Knots::new(LONGEST, 1);
    move |i, len| {
        let (curve, m, power) = &curves[i];
        if len > *m && *m > 0 {
            return knots.read(curve, *m).of(*m) * (f64::from(len) / f64::from(*m)).powf(*power);
        }
        knots.read(curve, *m).of(len)
    }
}

/// Tokens through the network: the document, and each window with its prefix.
fn cost(doc: &Doc, reach: &[u32], prefix: u32) -> f64 {
    f64::from(doc.tokens) + (0..reach.len()).map(|i| f64::from(prefix + m(doc, i, reach[i]))).sum::<f64>()
}

/// How far each edge goes by a schedule, by one of the signals for which edges matter.
fn staged(doc: &Doc, name: &str, stages: &[Stage], window: u32, signal: &str) -> Vec<u32> {
    let curves = |of: &str| -> Curves { (0..doc.edges.len()).map(|i| curve(doc, i, of, window).to_vec()).collect() };
    let after: Vec<u32> = doc.edges.iter().map(|e| doc.tokens - e.token).collect();
    if signal == "lr" {
        return reach(stages, window, &Knots::new(window, 1), &curves(name), &after);
    }
    let knots = Knots::new(LONGEST, 1);
    let mean = |curves: &Curves, horizon: u32, sign: f32| -> Vec<f32> {
        (0..curves.len())
            .map(|i| sign * knots.read(curves.get(i), m(doc, i, window)).of(m(doc, i, horizon)) as f32 / m(doc, i, horizon) as f32)
            .collect()
    };
    let (lr, rr) = (curves(name), curves("rr"));
    let mut far = vec![0; doc.edges.len()];
    let mut left: Vec<usize> = (0..far.len()).filter(|&i| !lr.get(i).is_empty()).collect();
    let all = left.len() as f64;
    for stage in stages {
        left.iter().for_each(|&i| far[i] = stage.horizon);
        let (by_lr, by_rr) = (percentiles(&mean(&lr, stage.horizon, -1.0)), percentiles(&mean(&rr, stage.horizon, 1.0)));
        let worth = |i: usize| match signal {
            "rr" => by_rr[i],
            "both" => by_lr[i] + by_rr[i],
            "sentence" => by_lr[i] + f64::from(u8::from(doc.edges[i].sentence)),
            other => panic!("no signal {other}"),
        };
        left.sort_by(|&a, &b| worth(b).total_cmp(&worth(a)).then(a.cmp(&b)));
        left.truncate(((stage.keep * all).ceil() as usize).max(3));
        left.sort_unstable();
    }
    left.iter().for_each(|&i| far[i] = window);
    far
}

fn stages(of: &[(u32, f64)]) -> Vec<Stage> {
    of.iter().map(|&(horizon, keep)| Stage { horizon, keep }).collect()
}

fn grid(penalties: &[f64], weights: &[f64]) -> Vec<(f64, f64)> {
    weights.iter().flat_map(|w| penalties.iter().map(|p| (*p, *w))).collect()
}

/// What percentiles are worth less than 1, as damages, so that the same program cuts by them. Penalties are then minus the percentile.
fn by_percentile(utilities: Vec<f64>) -> Damage {
    Box::new(move |i, _| -utilities[i])
}

/// Curves to read, and candidates to read them at.
#[derive(Clone, Copy)]
struct Variant {
    /// What the curves are called in a document.
    name: &'static str,
    /// Tokens before each window.
    prefix: u32,
    /// Candidates: sentence ends, and the word boundary nearest to each multiple of so many tokens.
    grid: u32,
}

/// The documents as a coarser grid of candidates has them.
fn coarser(docs: &[Doc], grid: u32) -> Vec<Doc> {
    let coarse = |doc: &Doc| {
        let mut keep: Vec<bool> = doc.edges.iter().map(|e| e.sentence).collect();
        for multiple in (grid..doc.tokens).step_by(grid as usize) {
            let nearest = (0..keep.len()).min_by_key(|&i| (doc.edges[i].token.abs_diff(multiple), i));
            nearest.into_iter().for_each(|i| keep[i] = true);
        }
        let edges = doc.edges.iter().zip(keep).filter(|(_, keep)| *keep).map(|(e, _)| e.clone()).collect();
        Doc { edges, ..doc.clone() }
    };
    docs.iter().map(coarse).collect()
}

fn methods(variant: &Variant, all: bool) -> Vec<Method> {
    let (lr, prefix, grid_of) = (variant.name, variant.prefix, variant.grid);
    let quantiles: Vec<f64> =
        [0.80, 0.84, 0.88, 0.90, 0.92, 0.94, 0.95, 0.96, 0.965, 0.97, 0.975, 0.98, 0.985, 0.99].map(|p: f64| -p).to_vec();
    let nats: Vec<f64> = (2..=22).map(|i| f64::from(i) * 2.0).collect();
    let weights = [0.0, 3.0, 6.0, 10.0, 15.0, 20.0, 30.0];
    let mut list: Vec<Method> = Vec::new();
    let mut add = |name: String, settings: Vec<(f64, f64)>, of: Judge| list.push(Method { name, of, settings });
    let percentile = |name: &'static str, horizon: u32, skip: usize| -> Judge {
        Box::new(move |doc| {
            let knots = Knots::new(LONGEST, 1);
            let sign = if name == "rr" || name == "rr24" { 1.0 } else { -1.0 };
            let score = |i: usize| {
                let (tokens, curve) = (m(doc, i, horizon), curve(doc, i, name, horizon));
                let first = curve.get(skip.wrapping_sub(1)).copied().map_or(0.0, f64::from);
                if tokens <= 2 {
                    f32::NAN
                } else {
                    (sign * (knots.read(curve, tokens).of(tokens) - first) / f64::from(tokens - skip as u32)) as f32
                }
            };
            let scores: Vec<f32> = (0..doc.edges.len()).map(score).collect();
            let reach = vec![horizon; doc.edges.len()];
            (by_percentile(percentiles(&scores)), cost(doc, &reach, if name == "rr24" { 0 } else { prefix }))
        })
    };
    let damage = |window: u32, power: f64| -> Judge {
        Box::new(move |doc| {
            let reach = vec![window; doc.edges.len()];
            (Box::new(read(damages(doc, lr, &reach, power))), cost(doc, &reach, prefix))
        })
    };
    for window in [24, 48, 96, WINDOW] {
        add(format!("chunk damage {window}"), grid(&nats, &weights), damage(window, 0.5));
    }
    let schedule = |of: &'static [(u32, f64)], window: u32, signal: &'static str, power: f64| -> Judge {
        Box::new(move |doc| {
            let reach = staged(doc, lr, &stages(of), window, signal);
            (Box::new(read(damages(doc, lr, &reach, power))), cost(doc, &reach, prefix))
        })
    };
    const SCHEDULES: &[(&[(u32, f64)], u32)] = &[
        (&[(8, 0.4), (24, 0.15)], WINDOW),
        (&[(8, 0.4), (24, 0.2)], WINDOW),
        (&[(8, 0.5), (24, 0.2), (48, 0.1)], WINDOW),
        (&[(8, 0.4), (16, 0.25), (32, 0.15), (64, 0.1)], WINDOW),
        (&[(8, 0.5), (16, 0.3), (32, 0.15), (64, 0.08)], WINDOW),
        (&[(8, 0.3), (24, 0.15)], WINDOW),
        (&[(8, 0.25), (32, 0.12)], WINDOW),
        (&[(8, 0.25)], 96),
        (&[(8, 0.4), (24, 0.15)], 96),
        (&[(16, 0.3), (32, 0.15)], WINDOW),
        (&[(16, 0.6), (32, 0.3), (64, 0.15)], WINDOW),
    ];
    const SHORT: &[(&[(u32, f64)], u32)] = &[
        (&[(8, 0.6)], WINDOW),
        (&[(16, 0.6)], WINDOW),
        (&[(16, 0.5)], WINDOW),
        (&[(16, 0.4)], WINDOW),
        (&[(24, 0.5)], WINDOW),
        (&[(24, 0.3)], WINDOW),
        (&[(16, 0.6), (48, 0.4)], WINDOW),
        (&[(16, 0.5), (48, 0.25)], WINDOW),
    ];
    let (used, quantiles) = if grid_of > 8 {
        (SHORT, [0.5, 0.6, 0.7, 0.75, 0.8, 0.82, 0.84, 0.86, 0.88, 0.90, 0.92, 0.94, 0.95, 0.96, 0.97].map(|p: f64| -p).to_vec())
    } else {
        (SCHEDULES, quantiles)
    };
    for horizon in [8, 16, 24, 48, 96, WINDOW] {
        add(format!("LR {horizon}, percentile"), grid(&quantiles, &[0.02]), percentile(lr, horizon, 2));
    }
    for &(of, window) in used {
        let words: Vec<String> = of.iter().map(|(h, k)| format!("{h}:{k}")).collect();
        add(format!("chunk damage, stages {} {window}", words.join(" ")), grid(&nats, &weights), schedule(of, window, "lr", 0.5));
        add(
            format!("LR percentile, stages {} {window}", words.join(" ")),
            grid(&quantiles, &[0.02]),
            Box::new(move |doc| {
                let reach = staged(doc, lr, &stages(of), window, "lr");
                let knots = Knots::new(LONGEST, 1);
                let score = |i: usize| {
                    let (tokens, curve) = (m(doc, i, reach[i]), curve(doc, i, lr, reach[i]));
                    let first = curve.get(1).copied().map_or(0.0, f64::from);
                    if tokens <= 2 { f32::NAN } else { (-(knots.read(curve, tokens).of(tokens) - first) / f64::from(tokens - 2)) as f32 }
                };
                let scores: Vec<f32> = (0..doc.edges.len()).map(score).collect();
                let utilities = grouped_percentiles(|i| reach[i], &scores);
                (by_percentile(utilities), cost(doc, &reach, prefix))
            }),
        );
    }
    if !all {
        return list;
    }
    add("RR 24 of block 22, no prefix, percentile".into(), grid(&quantiles, &[0.02]), percentile("rr24", 24, 1));
    for horizon in [24, 96] {
        add(format!("RR {horizon} of block 22, percentile"), grid(&quantiles, &[0.02]), percentile("rr", horizon, 1));
    }
    add("LR 96 from the first token on, percentile".into(), grid(&quantiles, &[0.02]), percentile(lr, 96, 0));
    for lambda in [0.005, 0.05, 0.1] {
        add(format!("LR {WINDOW}, percentile, lambda {lambda}"), grid(&quantiles, &[lambda]), percentile(lr, WINDOW, 2));
    }
    for extra in [2.0, 4.0, 8.0, 16.0, 32.0] {
        for (what, plain) in [
            (format!("chunk damage {WINDOW}"), damage(WINDOW, 0.5)),
            (format!("chunk damage, stages 8:0.4 24:0.15 {WINDOW}"), schedule(&[(8, 0.4), (24, 0.15)], WINDOW, "lr", 0.5)),
            (
                format!("chunk damage, stages 8:0.4 24:0.15 {WINDOW}, kept by sentence"),
                schedule(&[(8, 0.4), (24, 0.15)], WINDOW, "sentence", 0.5),
            ),
        ] {
            add(
                format!("{what}, {extra} nats more inside sentences"),
                grid(&nats, &weights),
                Box::new(move |doc| {
                    let (plain, cost) = plain(doc);
                    let inside: Vec<f64> = doc.edges.iter().map(|e| if e.sentence { 0.0 } else { extra }).collect();
                    (Box::new(move |i, len| plain(i, len) + inside[i]), cost)
                }),
            );
        }
    }
    for extra in [0.02, 0.05, 0.1, 0.3] {
        let plain = percentile(lr, WINDOW, 2);
        add(
            format!("LR {WINDOW}, percentile, {extra} less inside sentences"),
            grid(&quantiles, &[0.02]),
            Box::new(move |doc| {
                let (plain, cost) = plain(doc);
                let inside: Vec<f64> = doc.edges.iter().map(|e| if e.sentence { 0.0 } else { extra }).collect();
                (Box::new(move |i, len| plain(i, len) + inside[i]), cost)
            }),
        );
    }
    for signal in ["rr", "both", "sentence"] {
        add(
            format!("chunk damage, stages 8:0.4 24:0.15 {WINDOW}, kept by {signal}"),
            grid(&nats, &weights),
            schedule(&[(8, 0.4), (24, 0.15)], WINDOW, signal, 0.5),
        );
    }
    for power in [0.0, 0.25, 0.75, 1.0] {
        add(
            format!("chunk damage, stages 8:0.4 24:0.15 {WINDOW}, extrapolated by the power {power}"),
            grid(&nats, &weights),
            schedule(&[(8, 0.4), (24, 0.15)], WINDOW, "lr", power),
        );
    }
    for q in [0.25, 0.5] {
        let plain = damage(WINDOW, 0.5);
        add(
            format!("chunk damage {WINDOW} / (length / 192)^{q}"),
            grid(&nats, &weights),
            Box::new(move |doc| {
                let (plain, cost) = plain(doc);
                (Box::new(move |i, len| plain(i, len) / (f64::from(len) / 192.0).powf(q)), cost)
            }),
        );
    }
    for cap in [0.5, 1.0, 2.0] {
        add(
            format!("chunk damage {WINDOW}, at most {cap} nats a token by eights"),
            grid(&nats, &weights),
            Box::new(move |doc| {
                let reach = vec![WINDOW; doc.edges.len()];
                let mut curves = damages(doc, lr, &reach, 0.5);
                for (values, ..) in &mut curves {
                    let (mut before, mut sum) = (0.0, 0.0);
                    for value in values.iter_mut() {
                        sum += (*value - before).clamp(-8.0 * cap, 8.0 * cap);
                        before = *value;
                        *value = sum;
                    }
                }
                (Box::new(read(curves)), cost(doc, &reach, prefix))
            }),
        );
    }
    for (what, staged_too) in [("", false), (", stages 8:0.4 24:0.15", true)] {
        let plain = if staged_too { schedule(&[(8, 0.4), (24, 0.15)], WINDOW, "lr", 0.5) } else { damage(WINDOW, 0.5) };
        add(
            format!("chunk damage {WINDOW}{what}, over the document's median at 8 tokens, times 20"),
            grid(&nats, &weights),
            Box::new(move |doc| {
                let (plain, cost) = plain(doc);
                let mut at8: Vec<f64> = (0..doc.edges.len()).map(|i| plain(i, 8)).filter(|d| !d.is_nan()).collect();
                at8.sort_by(f64::total_cmp);
                let median = at8.get(at8.len() / 2).copied().unwrap_or(20.0).max(1.0);
                (Box::new(move |i, len| plain(i, len) * 20.0 / median), cost)
            }),
        );
    }
    for weight in [3.0, 6.0, 12.0] {
        for (what, staged_too) in [("", false), (", stages 8:0.4 24:0.15", true)] {
            let plain = if staged_too { schedule(&[(8, 0.4), (24, 0.15)], WINDOW, "lr", 0.5) } else { damage(WINDOW, 0.5) };
            add(
                format!("chunk damage {WINDOW}{what}, less {weight} nats times the percentile of the embedding boundary"),
                grid(&nats, &weights),
                Box::new(move |doc| {
                    let (plain, cost) = plain(doc);
                    let embed = percentiles(&doc.edges.iter().map(|e| e.embed).collect::<Vec<_>>());
                    (Box::new(move |i, len| plain(i, len) + weight * (1.0 - embed[i])), cost)
                }),
            );
        }
    }
    list
}

/// What each setting of a method finds in each document, and the cost per source token.
fn table(method: &Method, settings: &[(f64, f64)], docs: &[Doc]) -> (Vec<Vec<Found>>, f64) {
    let made: Vec<(Damage, f64)> = docs.iter().map(|doc| (method.of)(doc)).collect();
    let found =
        |&(penalty, weight): &(f64, f64)| docs.iter().zip(&made).map(|(doc, (d, _))| judge(doc, &cut(doc, penalty, weight, d))).collect();
    let tokens: f64 = docs.iter().map(|d| f64::from(d.tokens)).sum();
    (settings.iter().map(found).collect(), made.iter().map(|m| m.1).sum::<f64>() / tokens)
}

fn total<'a>(found: impl Iterator<Item = &'a Found>) -> Found {
    found.fold(Found::default(), |mut sum, f| {
        sum.add(f);
        sum
    })
}

/// The best setting on some documents: by recovery, then by partition F1.
fn choose(table: &[Vec<Found>], on: &[usize]) -> usize {
    let score = |setting: usize| {
        let sum = total(on.iter().map(|&d| &table[setting][d]));
        (sum.recovery(), sum.f1())
    };
    (0..table.len()).max_by(|&a, &b| score(a).partial_cmp(&score(b)).unwrap().then(b.cmp(&a))).unwrap()
}

/// A row of the report: cross-validated figures, and the setting that is best on all documents.
struct Row {
    name: String,
    cost: f64,
    folded: Vec<Found>,
    setting: (f64, f64),
}

fn cross_validate(method: &Method, docs: &[Doc]) -> Row {
    let (table, cost) = table(method, &method.settings, docs);
    let mut folded = vec![Found::default(); docs.len()];
    for fold in 0..5 {
        let (test, train): (Vec<usize>, Vec<usize>) = (0..docs.len()).partition(|d| d % 5 == fold);
        let setting = choose(&table, &train);
        test.into_iter().for_each(|d| folded[d] = table[setting][d]);
    }
    let best = choose(&table, &(0..docs.len()).collect::<Vec<_>>());
    Row { name: method.name.clone(), cost, folded, setting: method.settings[best] }
}

fn print(rows: &[Row], docs: &[Doc]) {
    println!(
        "| score and objective | forward tokens per source token | clean-unit recovery | partition F1 | chunks per record | penalty, lambda |"
    );
    println!("|---|---|---|---|---|---|");
    for row in rows {
        let sum = total(row.folded.iter());
        let (low, high) = interval(docs, |drawn| total(drawn.iter().map(|&d| &row.folded[d])).recovery());
        let penalty = if row.setting.0 < 0.0 { -row.setting.0 } else { row.setting.0 };
        println!(
            "| {} | {:.1} | {:.3} [{low:.2}, {high:.2}] | {:.3} | {:.2} | {penalty}, {} |",
            row.name,
            row.cost,
            sum.recovery(),
            sum.f1(),
            sum.chunks / sum.records,
            row.setting.1
        );
    }
}

/// Recovery over that of a base on the same streams, with the interval of the difference.
fn gains(rows: &[Row], base: &[Found], docs: &[Doc]) {
    let recovery = |found: &[Found], drawn: &[usize]| total(drawn.iter().map(|&d| &found[d])).recovery();
    let all: Vec<usize> = (0..docs.len()).collect();
    for row in rows {
        let gain = |drawn: &[usize]| recovery(&row.folded, drawn) - recovery(base, drawn);
        let (low, high) = interval(docs, gain);
        println!("| {} | {:+.3} [{low:+.2}, {high:+.2}] |", row.name, gain(&all));
    }
}

/// Scores a file of streams, unless it has been done.
fn export(work: &Path, input: &Path, name: &str, score: &str) -> PathBuf {
    let output = work.join(format!("{name}.parquet"));
    if !output.exists() {
        println!("scoring {name} ...");
        let text =
            format!("[input]\npaths = [{input:?}]\nid_column = \"id\"\n[cache]\npath = {:?}\n[score]\n{score}\n", work.join("cache"));
        let pipeline = Pipeline::parse(&text).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let (_keep, stop) = tokio::sync::watch::channel(None);
        runtime.block_on(pipeline::export_edges(&pipeline, &model::models_dir(None), &output, true, None, stop)).unwrap();
    }
    output
}

/// What the product itself makes of streams with a preset, the tokens that went through the network per source token, and the seconds of scoring.
fn product(work: &Path, streams: &[Stream], settings: &str) -> (Vec<Found>, f64, f64) {
    let pipeline =
        Pipeline::parse(&format!("{settings}\n[input]\nid_column = \"id\"\n[cache]\npath = {:?}\n", work.join("product"))).unwrap();
    let ids: ArrayRef = Arc::new(streams.iter().map(|s| Some(s.id.as_str())).collect::<StringArray>());
    let texts: ArrayRef = Arc::new(streams.iter().map(|s| Some(s.text.as_str())).collect::<StringArray>());
    let batch = RecordBatch::try_from_iter([("id", ids), ("text", texts)]).unwrap();
    let scorer = Arc::new(pipeline::Scorer::new(&pipeline, &model::models_dir(None)).unwrap());
    let operator = Arc::new(pipeline::Operator::new(&pipeline, Arc::clone(&scorer), &batch.schema()).unwrap());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let input = futures::stream::iter([Ok(batch)]);
    let chunks: Vec<RecordBatch> = runtime.block_on(operator.run("streams".into(), input).map(|b| b.unwrap()).collect());
    let mut cuts: std::collections::HashMap<String, Vec<u32>> = Default::default();
    for batch in &chunks {
        let (id, start) = (batch.column_by_name("doc_id").unwrap(), batch.column_by_name("token_start").unwrap());
        for (id, start) in id.as_string::<i32>().iter().zip(start.as_primitive::<Int32Type>().values()).filter(|(_, start)| **start > 0) {
            cuts.entry(id.unwrap().to_owned()).or_default().push(*start as u32);
        }
    }
    let tokenizer = model::load_tokenizer(&model::resolve("smollm2-135m", &model::models_dir(None)).unwrap().path).unwrap();
    let docs: Vec<Doc> = streams.iter().map(|s| Doc::new(s, &tokenizer)).collect();
    let found = streams.iter().zip(&docs).map(|(s, doc)| judge(doc, cuts.get(&s.id).map_or(&[][..], Vec::as_slice))).collect();
    let stats = scorer.engine_stats().unwrap_or_default();
    (found, stats.forward_tokens as f64 / (stats.source_tokens as f64).max(1.0), stats.busy_seconds)
}

/// The same records with lines of at most 72 characters.
fn wrapped(stream: &Stream) -> Stream {
    let (mut text, mut column) = (stream.text.clone().into_bytes(), 0);
    let mut space = None;
    for i in 0..text.len() {
        if text[i] == b' ' {
            space = Some(i);
        }
        column += 1;
        if let (true, Some(at)) = (column > 72, space) {
            text[at] = b'\n';
            (column, space) = (i - at, None);
        }
    }
    Stream { id: format!("{}-wrapped", stream.id), text: String::from_utf8(text).unwrap(), ..stream.clone() }
}

/// Pieces of source files of this project, joined by a line feed.
fn code() -> Vec<Stream> {
    let mut files: Vec<PathBuf> = ["src/io", "src/model", "src/pipeline", "src/text", "src/segment", "src/score"]
        .iter()
        .flat_map(|dir| std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(dir)).unwrap().map(|e| e.unwrap().path()))
        .filter(|path| path.extension().is_some_and(|e| e == "rs"))
        .collect();
    files.sort();
    let pieces: Vec<String> = files
        .iter()
        .filter_map(|file| {
            let text = std::fs::read_to_string(file).unwrap();
            let start = text.find("impl ")?;
            let end = text[start..].char_indices().filter(|(_, c)| *c == '}').map(|(i, _)| i + 1).find(|i| *i > 700)?;
            (end < 1500).then(|| text[start..start + end].to_owned())
        })
        .collect();
    let of = |(i, pieces): (usize, &[String])| {
        let starts = pieces.iter().scan(0, |at, piece| Some(std::mem::replace(at, *at + piece.len() + 1))).collect();
        Stream { id: format!("code-{i}"), domain: "code".into(), text: pieces.join("\n"), starts }
    };
    pieces.chunks_exact(4).enumerate().map(of).collect()
}

fn ids(streams: &[Stream]) -> Vec<String> {
    streams.iter().map(|s| s.id.clone()).collect()
}

/// What stands before the window, on all streams.
fn prefixes(work: &Path, packed: &Path, streams: &[Stream], tokenizer: &Tokenizer) {
    // What stands before the window, with the default's stages, on all streams.
    let mut rows: Vec<Row> = Vec::new();
    let mut every: Vec<Doc> = streams.iter().map(|s| Doc::new(s, tokenizer)).collect();
    const PREFIXES: [(&str, &str); 3] = [("document", "document"), ("newline", "separator:\n"), ("bos", "bos")];
    const DEFAULT: &[(u32, f64)] = &[(16, 0.5), (48, 0.3), (96, 0.2)];
    for (name, prefix) in PREFIXES {
        let settings = format!(
            "readouts = [\"lr\"]\nreset_prefix = {prefix:?}\nstages = [[16, 0.5], [48, 0.3], [96, 0.2], [256]]\n[edges]\ngrid = 32"
        );
        read_edges(&export(work, packed, &format!("all-{name}"), &settings), &ids(streams), &mut every, &[("curve", name)]);
    }
    for (name, _) in PREFIXES {
        let judge = move |doc: &Doc| -> (Damage, f64) {
            let reach = staged(doc, name, &stages(DEFAULT), 256, "lr");
            (Box::new(read(damages(doc, name, &reach, 0.5))), cost(doc, &reach, 1))
        };
        let settings = grid(&(4..=18).map(|i| f64::from(i) * 2.0).collect::<Vec<_>>(), &[6.0, 10.0, 15.0, 20.0, 30.0]);
        let method = Method { name: format!("the default's stages ({name})"), of: Box::new(judge), settings };
        rows.push(cross_validate(&method, &every));
    }
    println!("\n## What stands before the window, the default's stages: all {} streams, every 32 tokens\n", every.len());
    print(&rows, &every);
    println!();
    gains(&rows[1..], &rows[0].folded, &every);
}

/// The presets on texts of several kinds.
fn products(work: &Path, dev: &[Stream], streams: &[Stream], part: &[Stream], tokenizer: &Tokenizer) {
    println!("\n## The product itself\n");
    println!("| texts | preset | forward tokens per source token | seconds | clean-unit recovery | partition F1 |");
    println!("|---|---|---|---|---|---|");
    let wrapped: Vec<Stream> = part.iter().map(wrapped).collect();
    let short: Vec<Stream> = streams.iter().filter(|s| s.starts.len() == 3).take(part.len()).cloned().collect();
    let kinds = [
        ("last word", dev),
        ("study, a sixth", part),
        ("the same, lines of 72 characters", &wrapped),
        ("study, three records", &short),
        ("Rust code", &code()),
    ];
    for (what, streams) in kinds {
        for preset in ["standard", "thorough", "paper"] {
            if preset == "thorough" && what != "last word" {
                continue;
            }
            let (found, cost, seconds) = product(work, streams, &format!("preset = {preset:?}"));
            let (sum, docs) = (total(found.iter()), streams.iter().map(|s| Doc::new(s, tokenizer)).collect::<Vec<_>>());
            let (low, high) = interval(&docs, |drawn| total(drawn.iter().map(|&d| &found[d])).recovery());
            println!(
                "| {what} ({} records) | {preset} | {cost:.1} | {seconds:.0} | {:.3} [{low:.2}, {high:.2}] | {:.3} |",
                sum.records,
                sum.recovery(),
                sum.f1()
            );
        }
    }
}

fn main() {
    // Sections by name, or all: tables, prefixes, product.
    let named: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let wanted = |section: &str| named.is_empty() || named.iter().any(|n| n == section);
    let Some(data) = std::env::var_os("RIGHT_RESET_STUDY_DATA").map(PathBuf::from) else {
        println!("RIGHT_RESET_STUDY_DATA names no folder: nothing to study");
        return;
    };
    let text = |name: &str| std::fs::read_to_string(data.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    let work = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target/study");
    std::fs::create_dir_all(&work).unwrap();
    let models = model::models_dir(None);
    let (dev, calibration) = (Stream::read(&text("streams_dev.jsonl")), Stream::read(&text("streams_calibration.jsonl")));
    let packed = work.join("streams.jsonl");
    if !packed.exists() {
        let encoder = model::resolve("minilm-l6", &models).unwrap();
        let used = [dev.clone(), calibration].concat();
        let streams = streams::build(&text("records.jsonl"), &used, &Encoder::load(&encoder.path).unwrap(), 1);
        let lines: Vec<String> = streams.iter().map(|s| s.to_json().to_string()).collect();
        std::fs::write(&packed, lines.join("\n") + "\n").unwrap();
    }
    let streams = Stream::read(&std::fs::read_to_string(&packed).unwrap());
    let tokenizer = model::load_tokenizer(&model::resolve("smollm2-135m", &models).unwrap().path).unwrap();
    let part: Vec<Stream> = streams.iter().step_by(6).cloned().collect();
    if wanted("prefixes") {
        prefixes(&work, &packed, &streams, &tokenizer);
    }
    if wanted("product") {
        products(&work, &dev, &streams, &part, &tokenizer);
    }
    if !wanted("tables") {
        return;
    }
    let dev_file = data.join("streams_dev.jsonl");
    let (lr_rr, lr, rr) = ("readouts = [\"lr\", \"rr\"]", "readouts = [\"lr\"]", "readouts = [\"rr\"]\nwindow = 24");

    let document = format!("{lr_rr}\nreset_prefix = \"document\"\nwindow = {WINDOW}");
    let embed = "readouts = [\"embed\"]";
    let mut own: Vec<Doc> = streams.iter().map(|s| Doc::new(s, &tokenizer)).collect();
    let curves = [("curve_lr", "document"), ("curve_rr", "rr")];
    read_edges(&export(&work, &packed, "streams-document", &document), &ids(&streams), &mut own, &curves);
    read_edges(&export(&work, &packed, "streams-rr24", rr), &ids(&streams), &mut own, &[("curve", "rr24")]);
    read_edges(&export(&work, &packed, "streams-embed", embed), &ids(&streams), &mut own, &[("score", "embed")]);
    let mut last: Vec<Doc> = dev.iter().map(|s| Doc::new(s, &tokenizer)).collect();
    let long = format!("{lr_rr}\nreset_prefix = \"document\"\nwindow = {DEV_WINDOW}");
    read_edges(&export(&work, &dev_file, "dev-document", &long), &ids(&dev), &mut last, &curves);
    read_edges(&export(&work, &dev_file, "dev-rr24", rr), &ids(&dev), &mut last, &[("curve", "rr24")]);
    read_edges(&export(&work, &dev_file, "dev-embed", embed), &ids(&dev), &mut last, &[("score", "embed")]);

    println!("\n## {} streams, {} records, 5-fold cross-validation\n", own.len(), own.iter().map(|d| d.starts.len()).sum::<usize>());
    let mut studied: Vec<(Variant, Vec<Method>, Vec<Row>)> = Vec::new();
    for grid in [8, 16, 32, 64, 100_000] {
        let variant = Variant { name: "document", prefix: 1, grid };
        let list = methods(&variant, grid == 8);
        let docs = coarser(&own, grid);
        let rows: Vec<Row> = list.par_iter().map(|m| cross_validate(m, &docs)).collect();
        println!("### Candidates: sentence ends and every {grid} tokens\n");
        print(&rows, &docs);
        studied.push((variant, list, rows));
    }

    // Other prefixes, on a part of the streams.
    let few = work.join("part.jsonl");
    std::fs::write(&few, part.iter().map(|s| s.to_json().to_string() + "\n").collect::<String>()).unwrap();
    let mut some: Vec<Doc> = part.iter().map(|s| Doc::new(s, &tokenizer)).collect();
    read_edges(&work.join("streams-document.parquet"), &ids(&part), &mut some, &curves);
    let others = [("none", "none", 96), ("newline", "separator:\n", 96), ("long", "document", 256)];
    for (name, prefix, window) in others {
        let settings = format!("{lr}\nreset_prefix = {prefix:?}\nwindow = {window}\n[edges]\ngrid = 32");
        read_edges(&export(&work, &few, &format!("part-{name}"), &settings), &ids(&part), &mut some, &[("curve", name)]);
    }
    let some = coarser(&some, 32);
    println!("\n## What stands before the window, and how long it is: {} of these streams, every 32 tokens\n", some.len());
    let mut rows = Vec::new();
    for (name, prefix) in [("document", 1), ("none", 0), ("newline", 1)] {
        let list = methods(&Variant { name, prefix, grid: 32 }, false);
        let wanted = ["LR 24, percentile", "LR 96, percentile", "chunk damage 96"];
        let chosen = list.into_iter().filter(|m| wanted.contains(&m.name.as_str()));
        rows.extend(chosen.map(|m| Row { name: format!("{} ({name})", m.name), ..cross_validate(&m, &some) }));
    }
    for window in [96, 128, 192, 256] {
        let of = move |doc: &Doc| -> (Damage, f64) {
            let reach = vec![window; doc.edges.len()];
            (Box::new(read(damages(doc, "long", &reach, 0.5))), cost(doc, &reach, 1))
        };
        let nats: Vec<f64> = (6..=20).map(|i| f64::from(i) * 2.0).collect();
        let method = Method { name: format!("chunk damage {window} (document)"), of: Box::new(of), settings: grid(&nats, &[15.0]) };
        rows.push(cross_validate(&method, &some));
    }
    // Stages with a longer last window, on the same streams.
    let nats: Vec<f64> = (6..=20).map(|i| f64::from(i) * 2.0).collect();
    const LONG: &[(&[(u32, f64)], u32)] = &[
        (&[(16, 0.5)], 128),
        (&[(16, 0.4)], 192),
        (&[(16, 0.5)], 192),
        (&[(16, 0.5), (48, 0.3)], 192),
        (&[(16, 0.5), (64, 0.3)], 192),
        (&[(16, 0.4), (48, 0.3)], 192),
        (&[(16, 0.5), (48, 0.25)], 256),
        (&[(16, 0.5), (48, 0.3), (96, 0.2)], 256),
    ];
    let mut long: Vec<Method> = Vec::new();
    for &(of, window) in LONG {
        let words: Vec<String> = of.iter().map(|(h, k)| format!("{h}:{k}")).collect();
        for curves in ["long", "document"] {
            let judge = move |doc: &Doc| -> (Damage, f64) {
                let reach = staged(doc, curves, &stages(of), window, "lr");
                (Box::new(read(damages(doc, curves, &reach, 0.5))), cost(doc, &reach, 1))
            };
            let name = format!("chunk damage, stages {} {window} ({curves})", words.join(" "));
            long.push(Method { name, of: Box::new(judge), settings: grid(&nats, &[15.0]) });
        }
    }
    let (on_study, on_dev): (Vec<Method>, Vec<Method>) = long.into_iter().partition(|m| m.name.ends_with("(long)"));
    rows.extend(on_study.par_iter().map(|m| cross_validate(m, &some)).collect::<Vec<_>>());
    print(&rows, &some);

    println!("\n## Windows of 192 tokens on the streams kept for the last word, every 32 tokens, 22 nats\n");
    let docs = coarser(&last, 32);
    let fixed = |method: &Method| {
        let (mut found, cost) = table(method, &[(22.0, 15.0)], &docs);
        Row { name: method.name.clone(), cost, folded: found.remove(0), setting: (22.0, 15.0) }
    };
    let of = |doc: &Doc| -> (Damage, f64) {
        let reach = vec![DEV_WINDOW; doc.edges.len()];
        (Box::new(read(damages(doc, "document", &reach, 0.5))), cost(doc, &reach, 1))
    };
    let whole = Method { name: format!("chunk damage {DEV_WINDOW}"), of: Box::new(of), settings: Vec::new() };
    let longest: Vec<Row> = on_dev.iter().filter(|m| !m.name.contains(" 256 ")).chain([&whole]).map(fixed).collect();
    print(&longest, &docs);

    let records: usize = last.iter().map(|d| d.starts.len()).sum();
    println!("\n## The streams kept for the last word: {} streams, {records} records, settings chosen above\n", last.len());
    let mut finals: Vec<Row> = Vec::new();
    for (variant, list, rows) in &studied {
        let docs = coarser(&last, variant.grid);
        println!("### Candidates: sentence ends and every {} tokens\n", variant.grid);
        let fixed = list.par_iter().zip(rows).map(|(method, row)| {
            let (mut found, cost) = table(method, &[row.setting], &docs);
            Row { name: format!("{} (every {})", row.name, variant.grid), cost, folded: found.remove(0), setting: row.setting }
        });
        let fixed: Vec<Row> = fixed.collect();
        print(&fixed, &docs);
        finals.extend(fixed);
    }
    let base = finals.iter().find(|r| r.name.starts_with("RR 24 of block 22, no prefix")).map(|r| r.folded.clone()).unwrap();
    println!("\n## Recovery over that of RR at 24 tokens, same streams\n");
    gains(&finals, &base, &last);
}
