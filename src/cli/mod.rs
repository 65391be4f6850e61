//! Arguments, printing, exit codes: the only place that prints. Everything but results goes to standard error.

mod args;
mod print;
mod progress;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use right_reset::cache::{self, CacheError, Imported, Prune, SledStore};
use right_reset::eval::Packing;
use right_reset::io::IoError;
use right_reset::model::{self, ModelError};
use right_reset::pipeline::spec::{OnMiss, Pipeline, SpecError, SpecSources};
use right_reset::pipeline::{
    self, EvalOptions, MechanismOptions, Method, PlanOptions, RunError, RunOptions, SectionOptions, Stop, StreamOptions, ViewOptions,
    cache_path,
};
use right_reset::report;
use right_reset::score::ScoreError;
use tokio::sync::watch;

use args::{Args, CacheCommand, Command, Common, ModelsCommand, SchemaName, StreamsCommand};

/// What a failure is, and so the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// The data or the configuration is at fault.
    Fault = 1,
    /// The command line is at fault.
    Usage = 2,
    /// A bug.
    Bug = 70,
    /// Try again.
    TryAgain = 75,
    /// Ctrl-C.
    Interrupted = 130,
    /// SIGTERM.
    Terminated = 143,
}

struct Failure {
    kind: Kind,
    text: String,
}

impl From<RunError> for Failure {
    fn from(error: RunError) -> Self {
        let kind = match &error {
            RunError::Stopped(Stop::Interrupt) => Kind::Interrupted,
            RunError::Stopped(Stop::Terminate) => Kind::Terminated,
            RunError::Stopped(Stop::Deadline) | RunError::Cache(CacheError::Locked { .. } | CacheError::Damaged { .. }) => Kind::TryAgain,
            RunError::Io(IoError::File { source, .. }) if source.kind() == std::io::ErrorKind::WouldBlock => Kind::TryAgain,
            RunError::Bug(_) | RunError::Score(ScoreError::Worker(_)) => Kind::Bug,
            _ => Kind::Fault,
        };
        Self { kind, text: error.to_string() }
    }
}

macro_rules! failure_from {
    ($($error:ty),+) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                RunError::from(error).into()
            }
        })+
    };
}

failure_from!(SpecError, IoError, ModelError, CacheError);

impl Failure {
    fn fault(text: impl Into<String>) -> Self {
        Self { kind: Kind::Fault, text: text.into() }
    }
}

/// Runs the command line and gives its exit code.
pub(crate) fn main() -> ExitCode {
    let args = Args::parse();
    // Reads FAILPOINTS in test builds; nothing otherwise.
    let _scenario = fail::FailScenario::setup();
    print::start_logging(args.log_format);
    let result = std::panic::catch_unwind(|| dispatch(args));
    let failure = match result {
        Ok(Ok(())) => return ExitCode::SUCCESS,
        Ok(Err(failure)) => failure,
        Err(_) => Failure { kind: Kind::Bug, text: "the program panicked: this is a bug, please report it with the lines above".into() },
    };
    eprintln!("error: {}", failure.text);
    ExitCode::from(failure.kind as u8)
}

fn dispatch(args: Args) -> Result<(), Failure> {
    let models = model::models_dir(args.models_dir.as_deref());
    match args.command {
        Command::Run(run) => {
            let pipeline = load(&run.common, run.parts.output.as_deref())?;
            let rank = share(&run.parts)?;
            let progress = progress::reporter(run.progress);
            let stop_after = run.stop_after.map(|d| d.0);
            let result = block_on(stop_after, |stop| {
                let options = RunOptions {
                    models: models.clone(),
                    limit: run.common.limit,
                    checksum: run.parts.checksum,
                    prune: run.parts.prune,
                    force: run.parts.force,
                    rank,
                    recalibrate: run.recalibrate,
                    stop,
                    progress,
                };
                async { pipeline::run(&pipeline, options).await }
            });
            if let Some(file) = &run.metrics {
                let code = result.as_ref().map_or_else(|failure| failure.kind as u8, |_| 0);
                print::metrics(file, result.as_ref().ok(), code)?;
            }
            let summary = result?;
            print::summary(&summary);
            if let (Some(count), Some(folder)) = (run.show, pipeline.output.path.as_deref().filter(|p| *p != "-")) {
                print::first_chunks(Path::new(folder), count)?;
            }
            Ok(())
        }
        Command::Plan(args) => {
            let pipeline = load(&args.common, args.parts.output.as_deref())?;
            let rank = share(&args.parts)?;
            let found = block_on(None, |stop| {
                let options = PlanOptions {
                    models: models.clone(),
                    limit: args.common.limit,
                    checksum: args.parts.checksum,
                    prune: args.parts.prune,
                    force: args.parts.force,
                    rank,
                    stop,
                };
                async { pipeline::plan(&pipeline, options).await }
            })?;
            print::plan(&found, args.json)
        }
        Command::Status { output, json } => print::status(&pipeline::status(&output)?, json),
        Command::Score(score) => {
            let pipeline = load(&score.common, None)?;
            let (documents, edges) =
                block_on(None, |stop| pipeline::export_edges(&pipeline, &models, &score.output, score.curves, score.common.limit, stop))?;
            eprintln!("{edges} candidate edges of {documents} documents written to {}", score.output.display());
            Ok(())
        }
        Command::Sweep(sweep) => {
            let mut pipeline = load(&sweep.common, None)?;
            pipeline.cache.on_miss = if sweep.on_miss == Some(args::SweepOnMiss::Score) { OnMiss::Score } else { OnMiss::Skip };
            let found = block_on(None, |stop| pipeline::sweep(&pipeline, &models, &sweep.penalty.0, sweep.common.limit, stop))?;
            print::sweep(&found, sweep.json)
        }
        Command::View(args) => {
            const DOCUMENTS: u64 = 200;
            let limit = args.common.limit.unwrap_or(DOCUMENTS);
            let file = &args.common.pipeline;
            let found = if is_pipeline(file) {
                let pipeline = load(&args.common, None)?;
                block_on(None, |stop| {
                    let (models, gold) = (models.clone(), args.gold.clone());
                    async { pipeline::view(&pipeline, ViewOptions { models, gold, document: None, limit: Some(limit), stop }).await }
                })?
            } else {
                block_on(None, |stop| pipeline::view_chunks(file, Some(limit), stop))?
            };
            right_reset::io::write_whole(&args.output, report::html(&found).as_bytes())?;
            let more = if args.common.limit.is_none() && found.documents.len() as u64 == limit { "; --limit takes more" } else { "" };
            eprintln!("{} documents written to {}{more}", found.documents.len(), args.output.display());
            Ok(())
        }
        Command::Show(args) => {
            let pipeline = load(&args.common, None)?;
            let found = block_on(None, |stop| {
                let (models, gold, document) = (models.clone(), args.gold.clone(), Some(args.document.clone()));
                async { pipeline::view(&pipeline, ViewOptions { models, gold, document, limit: args.common.limit, stop }).await }
            })?;
            print::documents(&found)
        }
        Command::Mechanism(args) => {
            let limit = args.common.limit;
            let pipeline = load_any(args.common)?;
            let found = block_on(None, |stop| {
                // A separator is typed with \\n for a line feed.
                let prefixes = args.prefixes.iter().map(|p| p.replace("\\n", "\n")).collect();
                let (source, models) = (args.source.clone(), models.clone());
                let (passages, tokens, resamples, seed) = (args.passages, args.tokens, args.drawing.resamples, args.seed);
                let options = MechanismOptions { models, source, passages, tokens, limit, prefixes, resamples, seed, stop };
                async { pipeline::mechanism(&pipeline, options).await }
            })?;
            if args.json { print::json(&found) } else { print::mechanism(&found, args.drawing.markdown) }
        }
        Command::Sections(args) => {
            let limit = args.common.limit;
            let pipeline = load_any(args.common)?;
            let (calibration, resamples, seed) = (args.calibration, args.drawing.resamples, args.seed);
            let found = block_on(None, |stop| {
                let options = SectionOptions { models: models.clone(), calibration, limit, resamples, seed, stop };
                async { pipeline::sections(&pipeline, options).await }
            })?;
            if args.json { print::json(&found) } else { print::sections(&found, args.drawing.markdown) }
        }
        Command::Streams { command: StreamsCommand::Build(args) } => {
            let built = block_on(None, |stop| pipeline::build_streams(stream_options(args, models.clone(), stop)))?;
            print::built(&built);
            Ok(())
        }
        Command::Calibrate(args) => {
            let pipeline = load(&args.judging.common, None)?;
            let found = block_on(None, |stop| pipeline::find_penalties(&pipeline, judging(&args.judging, &models, stop), args.fusion))?;
            let overlay = pipeline::overlay(&found);
            match &args.output {
                Some(file) => right_reset::io::write_whole(file, overlay.as_bytes())?,
                None if !args.judging.json => print::out(&overlay)?,
                None => {}
            }
            print::calibrated(&found, args.judging.json)
        }
        Command::Eval(args) => {
            let pipeline = load(&args.judging.common, None)?;
            let baseline = args.baseline.as_deref();
            let found = block_on(None, |stop| {
                pipeline::evaluate(
                    &pipeline,
                    EvalOptions { chunks: args.chunks.clone(), ..judging(&args.judging, &models, stop) },
                    baseline,
                    args.drawing.resamples,
                )
            })?;
            match (args.judging.json, args.drawing.markdown) {
                (true, _) => print::json(&found),
                (_, markdown) => print::evaluation(&found, markdown),
            }
        }
        Command::Models { command } => match command {
            ModelsCommand::List => {
                print::models(&models);
                Ok(())
            }
            ModelsCommand::Fetch { name } => {
                eprintln!("fetching {name} ...");
                let mut bar = progress::fetching();
                let (path, fetched) = model::fetch(&name, &models, &mut *bar)?;
                eprintln!("{} {}", if fetched { "stored" } else { "already there:" }, path.display());
                Ok(())
            }
            ModelsCommand::Show { name } => {
                let found = model::resolve(&name, &models)?;
                let memory = models.join(".identities");
                let identity = match model::identity(&found.path, &memory) {
                    Ok(identity) => print::Shown::Model(identity),
                    // What is no language model may be an encoder.
                    Err(error) => print::Shown::Encoder(model::encoder_identity(&found.path, &memory).map_err(|_| error)?),
                };
                print::model(&found, &identity);
                Ok(())
            }
        },
        Command::Cache { command, pipeline, path } => {
            let own = match &command {
                CacheCommand::Stats { pipeline } | CacheCommand::Verify { pipeline } | CacheCommand::Path { pipeline } => pipeline.clone(),
                _ => None,
            };
            let path = match (path, own.or(pipeline)) {
                (Some(path), _) => path,
                (None, Some(file)) => cache_path(&Pipeline::load(&SpecSources { file, ..SpecSources::default() })?),
                (None, None) => cache_path(&Pipeline::default()),
            };
            cache(command, &path, &models)
        }
        Command::Schema { name } => {
            let value = match name {
                SchemaName::Pipeline => schemars::schema_for!(Pipeline).to_value(),
                SchemaName::Chunks => pipeline::chunks_schema()?,
                SchemaName::Edges => pipeline::edges_schema(),
                SchemaName::Summary => pipeline::summary_schema(),
                SchemaName::Manifest => pipeline::manifest_schema(),
            };
            print::json(&value)
        }
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Args::command(), "right-reset", &mut std::io::stdout());
            Ok(())
        }
    }
}

fn stream_options(args: args::StreamsArgs, models: PathBuf, stop: watch::Receiver<Option<Stop>>) -> StreamOptions {
    StreamOptions {
        records: args.records,
        output: args.output,
        text_column: args.text_column,
        id_column: args.id_column,
        domain: args.domain,
        likeness: args.likeness,
        words: (args.min_words, args.max_words),
        packing: Packing { seed: args.seed, records: (3, 6), streams: args.streams, calibration: args.calibration },
        render: args.render,
        force: args.force,
        models,
        stop,
    }
}

fn judging(args: &args::Judging, models: &Path, stop: watch::Receiver<Option<Stop>>) -> EvalOptions {
    EvalOptions {
        models: models.to_owned(),
        gold: args.gold.clone(),
        domain: args.domain.clone(),
        prompt_model: args.prompt_model.clone(),
        chunks: Vec::new(),
        methods: if args.methods.is_empty() { Method::usual() } else { args.methods.clone() },
        limit: args.common.limit,
        seed: args.seed,
        stop,
    }
}

/// Loads a pipeline, or makes one of a file or folder of documents.
fn load_any(mut common: Common) -> Result<Pipeline, Failure> {
    if is_pipeline(&common.pipeline) {
        return load(&common, None);
    }
    common.input.insert(0, common.pipeline.display().to_string());
    let mut pipeline = Pipeline::with_settings(&common.overlay, &common.set)?;
    pipeline.input.paths = common.input;
    pipeline.model.threads = common.threads.or(pipeline.model.threads);
    pipeline.validate()?;
    Ok(pipeline)
}

/// Whether a path is that of a pipeline rather than of data.
fn is_pipeline(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "toml")
}

/// The share of the work that is asked for.
fn share(parts: &args::Parts) -> Result<Option<right_reset::io::Rank>, Failure> {
    parts.share(|name| std::env::var(name).ok()).map_err(|text| Failure { kind: Kind::Usage, text })
}

fn cache(command: CacheCommand, path: &Path, models: &Path) -> Result<(), Failure> {
    let none = || Failure::fault(format!("there is no score cache at {}", path.display()));
    let existing = || SledStore::open_to_read(path)?.ok_or_else(none);
    let to_rewrite = || if SledStore::is_at(path) { Ok(SledStore::open(path, None)?) } else { Err(none()) };
    match command {
        CacheCommand::Path { .. } => {
            println!("{}", path.display());
            Ok(())
        }
        CacheCommand::Stats { .. } => print::json(&existing()?.stats()?),
        CacheCommand::Verify { .. } => {
            let stats = existing()?.stats()?;
            let records: u64 = stats.namespaces.iter().map(|n| n.records).sum();
            println!("{records} records, {} unsound blocks", stats.unsound_blocks);
            if stats.unsound_blocks > 0 {
                return Err(Failure::fault("unsound blocks are never used: their documents are scored again when next met"));
            }
            Ok(())
        }
        CacheCommand::Export { file } => {
            let (records, unsound) = cache::export(&existing()?, &file)?;
            println!("{records} records written to {}", file.display());
            if unsound > 0 {
                return Err(Failure::fault(format!("{unsound} unsound records were left out; `right-reset cache compact` removes them")));
            }
            Ok(())
        }
        CacheCommand::Import { files } => imported(&cache::import(&SledStore::open(path, None)?, &files)?),
        CacheCommand::Merge { folders } => imported(&cache::merge(&SledStore::open(path, None)?, &folders)?),
        CacheCommand::Prune { model, readout, unused_for, dry_run } => {
            if model.is_none() && readout.is_none() && unused_for.is_none() {
                return Err(Failure { kind: Kind::Usage, text: "say what to remove with --model, --readout or --unused-for".into() });
            }
            // A path stands for the name that runs use.
            let model = model.map(|given| model::resolve(&given, models).map_or(given, |found| found.name));
            let store = to_rewrite()?;
            let chosen = store.to_prune(&Prune { model, kind: readout, unused_for: unused_for.map(|t| t.0) });
            if chosen.is_empty() {
                println!("nothing to remove");
                return Ok(());
            }
            for namespace in store.stats()?.namespaces.iter().filter(|n| chosen.contains(&cache::NamespaceId(n.id))) {
                println!("{} records of {}", namespace.records, serde_json::to_string(&namespace.namespace).unwrap_or_default());
            }
            if !dry_run {
                rewritten(store.rewrite(&chosen)?);
            }
            Ok(())
        }
        CacheCommand::Compact => {
            rewritten(to_rewrite()?.rewrite(&[])?);
            Ok(())
        }
    }
}

fn rewritten((before, after): (u64, u64)) {
    println!("{:.1} MiB before, {:.1} MiB now", before as f64 / 1_048_576.0, after as f64 / 1_048_576.0);
}

fn imported(all: &Imported) -> Result<(), Failure> {
    println!("{} records taken, {} were there", all.taken, all.known);
    let mut left: Vec<String> = all.left.iter().map(|(path, reason)| format!("{} was left: {reason}", path.display())).collect();
    if all.unsound > 0 {
        left.push(format!("{} unsound records were left", all.unsound));
    }
    if all.refused > 0 {
        left.push(format!("{} records found no room", all.refused));
    }
    if left.is_empty() { Ok(()) } else { Err(Failure::fault(left.join("; "))) }
}

/// Loads a pipeline with overlays, settings and flags over it.
fn load(common: &Common, output: Option<&str>) -> Result<Pipeline, Failure> {
    let sources = SpecSources { file: common.pipeline.clone(), overlays: common.overlay.clone(), settings: common.set.clone() };
    let mut pipeline = Pipeline::load(&sources)?;
    if !common.input.is_empty() {
        pipeline.input.paths.clone_from(&common.input);
    }
    if let Some(output) = output {
        pipeline.output.path = Some(output.to_owned());
    }
    if let Some(threads) = common.threads {
        pipeline.model.threads = Some(threads);
    }
    pipeline.validate()?;
    Ok(pipeline)
}

/// Runs a command on a runtime of its own, with signals and the deadline wired to its stop.
fn block_on<T, F>(stop_after: Option<std::time::Duration>, command: impl FnOnce(watch::Receiver<Option<Stop>>) -> F) -> Result<T, Failure>
where
    F: Future<Output = Result<T, RunError>>,
{
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|e| Failure::fault(format!("cannot start: {e}")))?;
    let (sender, receiver) = watch::channel(None);
    let result = runtime.block_on(async {
        tokio::spawn(async move {
            use tokio::signal::unix::{SignalKind, signal};
            let (Ok(mut interrupt), Ok(mut terminate)) = (signal(SignalKind::interrupt()), signal(SignalKind::terminate())) else {
                return;
            };
            let deadline = async {
                match stop_after {
                    Some(after) => tokio::time::sleep(after).await,
                    None => std::future::pending().await,
                }
            };
            let reason = tokio::select! {
                _ = interrupt.recv() => Stop::Interrupt,
                _ = terminate.recv() => Stop::Terminate,
                () = deadline => Stop::Deadline,
            };
            // The command may have ended in this moment.
            let _ = sender.send(Some(reason));
            std::future::pending::<()>().await;
        });
        command(receiver).await
    });
    runtime.shutdown_background();
    Ok(result?)
}
