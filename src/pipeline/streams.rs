//! The `streams build` command: a benchmark of flattened records from any record corpus.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use rayon::prelude::*;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::sync::watch;

use super::documents::blocking;
use super::run::{Rows, name, stopped};
use super::spec::{OnBadRow, PassThrough, Pipeline};
use super::{RunError, Stop};
use crate::eval::{Packing, Record, Stream, WordLikeness, flatten, pack, reread};
use crate::io::{IoError, TextCell, write_whole};
use crate::model::{self, Encoder, EncoderScratch};

/// Texts that go through the encoder at once.
const BATCH: usize = 16;

/// What streams are built of, and how.
pub struct StreamOptions {
    /// Files, folders or globs of records.
    pub records: Vec<String>,
    /// Folder for the streams.
    pub output: PathBuf,
    /// Column that holds the text.
    pub text_column: String,
    /// Column that identifies a record.
    pub id_column: Option<String>,
    /// Column that names the domain.
    pub domain: Option<String>,
    /// `words`, or an encoder.
    pub likeness: String,
    /// Fewest and most words of a record that is used.
    pub words: (usize, usize),
    /// How they are packed.
    pub packing: Packing,
    /// Render each stream at so many dots per inch, and read it back.
    pub render: Option<u32>,
    /// Replace streams that are there.
    pub force: bool,
    /// Folder of models.
    pub models: PathBuf,
    /// Says when to stop.
    pub stop: watch::Receiver<Option<Stop>>,
}

/// What was built; written beside the streams.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct Built {
    /// What likeness was measured by.
    pub likeness: String,
    /// Seed.
    pub seed: u64,
    /// Records read that could be used: of a fitting length.
    pub records: usize,
    /// Records left out for their length, or because they have no text.
    pub left_out: usize,
    /// Streams for calibration.
    pub calibration: usize,
    /// Streams for evaluation.
    pub evaluation: usize,
    /// Dots per inch, where streams were rendered and read back.
    pub render: Option<u32>,
    /// Mean agreement of the characters read back with those rendered.
    pub character_agreement: Option<f64>,
    /// Streams left out because a record was not read back.
    pub lost: usize,
}

/// Builds `calibration.jsonl`, `evaluation.jsonl` and `build.json` in a folder.
///
/// # Errors
/// [`RunError`], also if streams are there already, or if rendering lacks a program.
pub async fn build_streams(options: StreamOptions) -> Result<Built, RunError> {
    let stop = stopped(options.stop.clone());
    tokio::select! { biased; reason = stop => Err(RunError::Stopped(reason)), built = build(options) => built }
}

async fn build(options: StreamOptions) -> Result<Built, RunError> {
    let files = ["calibration.jsonl", "evaluation.jsonl", "build.json"].map(|name| options.output.join(name));
    if let Some(there) = files.iter().find(|file| file.exists()).filter(|_| !options.force) {
        return Err(IoError::Input(format!("{} is there already; --force replaces it", there.display())).into());
    }
    if options.render.is_some() {
        ["pango-view", "tesseract"].into_iter().try_for_each(installed)?;
    }
    let (records, left_out) = gather(&options).await?;
    if records.len() < options.packing.records.0 {
        let (least, most) = options.words;
        let reason = format!("{} records of {least} to {most} words are too few for a stream ({left_out} left out)", records.len());
        return Err(IoError::Input(reason).into());
    }
    let (count, packing, likeness, models) = (records.len(), options.packing.clone(), options.likeness.clone(), options.models.clone());
    let packed = blocking(move || {
        let texts: Vec<&str> = records.iter().map(|r| r.text.as_str()).collect();
        if likeness == "words" {
            let words = WordLikeness::new(&texts);
            return Ok(pack(&records, |a, b| words.of(a, b), &packing));
        }
        let encoder = Encoder::load(&model::resolve(&likeness, &models)?.path)?;
        let embed = |scratch: &mut EncoderScratch, texts: &[&str]| encoder.embed(texts, scratch);
        let vectors = texts.par_chunks(BATCH).map_init(EncoderScratch::default, embed).collect::<Result<Vec<_>, _>>()?.concat();
        Ok::<_, RunError>(pack(&records, |a, b| vectors[a].iter().zip(&vectors[b]).map(|(x, y)| x * y).sum(), &packing))
    });
    let (mut calibration, mut evaluation) = packed.await??;
    let (mut agreements, mut lost) = (Vec::new(), 0);
    if let Some(dpi) = options.render {
        for streams in [&mut calibration, &mut evaluation] {
            let (mut kept, rendered) = (Vec::new(), std::mem::take(streams));
            let read = blocking(move || {
                rendered.into_par_iter().map(|stream| Ok((read_back(&stream.text, dpi)?, stream))).collect::<Result<Vec<_>, RunError>>()
            });
            for (text, stream) in read.await?? {
                match reread(&stream, &flatten(&text)) {
                    Some((stream, agreement)) => {
                        agreements.push(agreement);
                        kept.push(stream);
                    }
                    None => lost += 1,
                }
            }
            *streams = kept;
        }
    }
    let built = Built {
        likeness: options.likeness,
        seed: options.packing.seed,
        records: count,
        left_out,
        calibration: calibration.len(),
        evaluation: evaluation.len(),
        render: options.render,
        character_agreement: options.render.map(|_| agreements.iter().sum::<f64>() / agreements.len().max(1) as f64),
        lost,
    };
    std::fs::create_dir_all(&options.output).map_err(crate::io::at(&options.output))?;
    let lines = |streams: &[Stream]| streams.iter().filter_map(|s| serde_json::to_string(s).ok()).map(|l| l + "\n").collect::<String>();
    write_whole(&files[0], lines(&calibration).as_bytes())?;
    write_whole(&files[1], lines(&evaluation).as_bytes())?;
    write_whole(&files[2], (serde_json::to_string_pretty(&built).unwrap_or_default() + "\n").as_bytes())?;
    Ok(built)
}

/// Records of a fitting length, flattened, and how many rows were left out.
async fn gather(options: &StreamOptions) -> Result<(Vec<Record>, usize), RunError> {
    let mut pipeline = Pipeline::default();
    pipeline.input.paths.clone_from(&options.records);
    pipeline.input.text_column.clone_from(&options.text_column);
    pipeline.input.id_column.clone_from(&options.id_column);
    pipeline.input.on_bad_row = OnBadRow::Fail;
    pipeline.input.pass_through = PassThrough::Columns(options.domain.iter().cloned().collect());
    let mut input = Rows::open(&pipeline, None)?;
    let (plan, names) = (Arc::clone(&input.plan), input.names.clone());
    let (mut records, mut left_out) = (Vec::new(), 0);
    while let Some((file, batch)) = input.next().await? {
        for (place, text) in batch.texts().enumerate() {
            let row = batch.rows[place];
            let text = match text {
                TextCell::Text(text) => flatten(text),
                TextCell::Null => String::new(),
                TextCell::Bad(reason) => return Err(IoError::BadRow { file: names[file].clone(), row, reason: reason.to_owned() }.into()),
            };
            if !(options.words.0..=options.words.1).contains(&text.split(' ').filter(|w| !w.is_empty()).count()) {
                left_out += 1;
                continue;
            }
            let id = input.id(file, &batch, place)?;
            let domain = match &options.domain {
                None => String::new(),
                Some(_) => name(batch.columns.column(plan.service), place)?,
            };
            records.push(Record { id, domain, text });
        }
    }
    Ok((records, left_out))
}

/// Whether a program is there, and if not, what to do.
fn installed(program: &str) -> Result<(), RunError> {
    let package = BTreeMap::from([("pango-view", "pango1.0-tools"), ("tesseract", "tesseract-ocr")]);
    let found = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    found.map(drop).map_err(|e| {
        let package = package.get(program).copied().unwrap_or(program);
        IoError::Input(format!("--render needs {program}: {e}; install it (Debian: apt-get install {package}), or leave --render out"))
            .into()
    })
}

/// Sets a text in one column, makes a picture of it, and reads that.
fn read_back(text: &str, dpi: u32) -> Result<String, RunError> {
    let folder = tempfile::tempdir().map_err(crate::io::at(Path::new("a temporary folder")))?;
    let (page, picture) = (folder.path().join("page.txt"), folder.path().join("page.png"));
    std::fs::write(&page, text).map_err(crate::io::at(&page))?;
    let mut set = Command::new("pango-view");
    // A column of 6.5 inches, in points.
    set.args(["--no-display", "--font=Serif 11", "--width=468", "--margin=36", "--wrap=word-char"]).arg(format!("--dpi={dpi}"));
    set.arg(format!("--output={}", picture.display())).arg(&page);
    run(&mut set)?;
    let mut read = Command::new("tesseract");
    read.arg(&picture).arg("stdout").args(["--psm", "6", "--dpi"]).arg(dpi.to_string());
    // Streams are read side by side.
    read.env("OMP_THREAD_LIMIT", "1");
    run(&mut read)
}

/// What a program writes to its standard output.
fn run(command: &mut Command) -> Result<String, RunError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let fail = |reason: String| RunError::from(IoError::Input(format!("{program} failed: {reason}")));
    let output = command.stdin(Stdio::null()).output().map_err(|e| fail(e.to_string()))?;
    if !output.status.success() {
        return Err(fail(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    String::from_utf8(output.stdout).map_err(|e| fail(e.to_string()))
}
