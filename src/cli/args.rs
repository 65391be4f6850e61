//! The arguments.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use right_reset::io::Rank;
use right_reset::pipeline::Method;

/// Cuts documents into chunks where a causal language model depends least on what came before.
#[derive(Debug, Parser)]
#[command(
    name = "right-reset",
    version,
    about,
    after_help = "Exit codes: 0 done; 1 the data or the configuration is at fault; 2 usage; 70 a bug; 75 try again; 130, 143 stopped by a signal."
)]
pub(super) struct Args {
    /// Folder of fetched models
    #[arg(long, global = true, env = "RIGHT_RESET_MODELS", value_name = "DIR")]
    pub(super) models_dir: Option<PathBuf>,
    /// Form of log lines on standard error
    #[arg(long, global = true, value_enum, default_value = "text")]
    pub(super) log_format: LogFormat,
    #[command(subcommand)]
    pub(super) command: Command,
}

/// Form of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum LogFormat {
    Text,
    Json,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Cut the documents of a pipeline's input into chunks
    Run(RunArgs),
    /// Say what a run would do, and about how long it would take; nothing is written
    Plan(PlanArgs),
    /// Say how far an output folder is: which ranks are done, what is missing, and their summaries joined
    Status {
        /// Output folder
        output: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Write the score of every candidate edge
    Score(ScoreArgs),
    /// Show what other cut penalties would give, from the cache alone
    Sweep(SweepArgs),
    /// Make an HTML page of documents, their scores and chunks
    View(ViewArgs),
    /// Show one document with its scores and chunks on the terminal
    Show(ShowArgs),
    /// Study whether cuts lie where the removed prefix matters least to the model's predictions
    Mechanism(MechanismArgs),
    /// Compare methods on documents whose sections are known, at the ends of their sentences
    Sections(SectionArgs),
    /// Make a benchmark of flattened records
    Streams {
        #[command(subcommand)]
        command: StreamsCommand,
    },
    /// Find the penalty of each method on documents whose true units are known
    Calibrate(CalibrateArgs),
    /// Compare methods on documents whose true units are known, with intervals
    Eval(EvalArgs),
    /// Models: list, fetch, show
    Models {
        #[command(subcommand)]
        command: ModelsCommand,
    },
    /// The score cache: count, check, export, import, merge, prune, compact
    Cache {
        /// Pipeline whose cache is meant
        #[arg(long, global = true, value_name = "FILE")]
        pipeline: Option<PathBuf>,
        /// Folder of the cache
        #[arg(long, global = true, value_name = "DIR")]
        path: Option<PathBuf>,
        #[command(subcommand)]
        command: CacheCommand,
    },
    /// Print the schema of a file
    Schema {
        #[arg(value_enum)]
        name: SchemaName,
    },
    /// Print completions for a shell
    Completions {
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
}

/// What decides which parts are made.
#[derive(Debug, ClapArgs)]
pub(super) struct Parts {
    /// Output folder, or - for standard output; replaces output.path
    #[arg(long, value_name = "DIR")]
    pub(super) output: Option<String>,
    /// Hash inputs even if their size and time are unchanged
    #[arg(long)]
    pub(super) checksum: bool,
    /// Remove the parts of inputs that are no longer listed
    #[arg(long)]
    pub(super) prune: bool,
    /// Make every part again; scores still come from the cache
    #[arg(long)]
    pub(super) force: bool,
    /// Do one share of the work: a number from 0, or slurm to take it from the variables of a Slurm array
    #[arg(long, value_name = "R")]
    pub(super) rank: Option<RankArg>,
    /// Shares of the work; each has its own cache, manifest and summary
    #[arg(long, value_name = "N", requires = "rank")]
    pub(super) world_size: Option<u32>,
}

/// Which share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RankArg {
    Number(u32),
    Slurm,
}

impl FromStr for RankArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "slurm" => Ok(Self::Slurm),
            _ => text.parse().map(Self::Number).map_err(|_| format!("{text:?} is neither a number nor slurm")),
        }
    }
}

impl Parts {
    /// The share that is asked for; `variable` reads the environment.
    pub(super) fn share(&self, variable: impl Fn(&str) -> Option<String>) -> Result<Option<Rank>, String> {
        let number = |name: &str| {
            let text =
                variable(name).ok_or_else(|| format!("--rank slurm: the variable {name} is not set; start it with sbatch --array=0-3"))?;
            text.parse::<u32>().map_err(|_| format!("--rank slurm: {name} is {text:?}, which is no number"))
        };
        let rank = match (self.rank, self.world_size) {
            (None, _) => return Ok(None),
            (Some(RankArg::Number(_)), None) => return Err("--rank needs --world-size: into how many shares the work is divided".into()),
            (Some(RankArg::Number(rank)), Some(world)) => Rank { rank, world },
            (Some(RankArg::Slurm), world) => {
                let (id, min) = (number("SLURM_ARRAY_TASK_ID")?, number("SLURM_ARRAY_TASK_MIN")?);
                let step = variable("SLURM_ARRAY_TASK_STEP").and_then(|s| s.parse().ok()).unwrap_or(1_u32).max(1);
                let world = world.map_or_else(|| number("SLURM_ARRAY_TASK_COUNT"), Ok)?;
                Rank { rank: id.saturating_sub(min) / step, world }
            }
        };
        if rank.rank >= rank.world {
            return Err(format!("rank {} of {}: ranks count from 0 and stay below the number of shares", rank.rank, rank.world));
        }
        Ok(Some(rank))
    }
}

/// What commands that read a pipeline share.
#[derive(Debug, ClapArgs)]
pub(super) struct Common {
    /// Pipeline file (TOML)
    pub(super) pipeline: PathBuf,
    /// Input file, folder or glob, or - for standard input; replaces input.paths
    #[arg(long, value_name = "PATH")]
    pub(super) input: Vec<String>,
    /// TOML file laid over the pipeline
    #[arg(long, value_name = "FILE")]
    pub(super) overlay: Vec<PathBuf>,
    /// One setting, such as segment.penalty=0.9; a value is TOML, else a string
    #[arg(long, value_name = "KEY=VALUE")]
    pub(super) set: Vec<String>,
    /// Read at most so many rows
    #[arg(long, value_name = "N")]
    pub(super) limit: Option<u64>,
    /// Inference threads
    #[arg(long, value_name = "N")]
    pub(super) threads: Option<u32>,
}

#[derive(Debug, ClapArgs)]
pub(super) struct RunArgs {
    #[command(flatten)]
    pub(super) common: Common,
    #[command(flatten)]
    pub(super) parts: Parts,
    /// Find the penalty of segment.target_mean_tokens anew
    #[arg(long)]
    pub(super) recalibrate: bool,
    /// Stop cleanly after this time, such as 4h or 30m; exit code 75
    #[arg(long, value_name = "TIME")]
    pub(super) stop_after: Option<Time>,
    /// Write figures of the run to FILE in the Prometheus text format, at its end
    #[arg(long, value_name = "FILE")]
    pub(super) metrics: Option<PathBuf>,
    /// Progress on standard error
    #[arg(long, value_enum, default_value = "auto")]
    pub(super) progress: ProgressKind,
    /// Show the first N chunks of the output at the end
    #[arg(long, value_name = "N")]
    pub(super) show: Option<usize>,
}

#[derive(Debug, ClapArgs)]
pub(super) struct PlanArgs {
    #[command(flatten)]
    pub(super) common: Common,
    #[command(flatten)]
    pub(super) parts: Parts,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// How progress is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum ProgressKind {
    /// A bar on a terminal, else plain lines
    Auto,
    Bar,
    Plain,
    None,
}

#[derive(Debug, ClapArgs)]
pub(super) struct ScoreArgs {
    #[command(flatten)]
    pub(super) common: Common,
    /// Output file: .parquet, .arrow or .jsonl
    #[arg(long, value_name = "FILE")]
    pub(super) output: PathBuf,
    /// Add the curve of each edge as a list column
    #[arg(long)]
    pub(super) curves: bool,
}

#[derive(Debug, ClapArgs)]
pub(super) struct SweepArgs {
    #[command(flatten)]
    pub(super) common: Common,
    /// Penalties: FROM:TO:STEP, or a list with commas
    #[arg(long, value_name = "RANGE", allow_hyphen_values = true)]
    pub(super) penalty: Penalties,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
    /// What to do about documents that are not in the cache
    #[arg(long, value_enum)]
    pub(super) on_miss: Option<SweepOnMiss>,
}

#[derive(Debug, ClapArgs)]
pub(super) struct ViewArgs {
    /// Pipeline file (.toml); or chunks that a run has written, a file or a folder, without scores of edges that were not cut
    #[command(flatten)]
    pub(super) common: Common,
    /// HTML file to write
    #[arg(long, value_name = "FILE")]
    pub(super) output: PathBuf,
    /// Column that holds the byte at which each true unit begins, to be drawn too
    #[arg(long, value_name = "COLUMN")]
    pub(super) gold: Option<String>,
}

#[derive(Debug, ClapArgs)]
pub(super) struct ShowArgs {
    #[command(flatten)]
    pub(super) common: Common,
    /// Id of the document; without input.id_column, <path>#<row>
    #[arg(long = "doc", value_name = "ID")]
    pub(super) document: String,
    /// Column that holds the byte at which each true unit begins, to be drawn too
    #[arg(long, value_name = "COLUMN")]
    pub(super) gold: Option<String>,
}

/// What commands that draw documents again share.
#[derive(Debug, ClapArgs)]
pub(super) struct Drawing {
    /// Times that documents, or sources, are drawn again
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub(super) resamples: usize,
    /// Print Markdown
    #[arg(long, conflicts_with = "json")]
    pub(super) markdown: bool,
}

#[derive(Debug, ClapArgs)]
pub(super) struct MechanismArgs {
    /// Pipeline file (.toml), of which input, model and cache count; or a file or folder of documents
    #[command(flatten)]
    pub(super) common: Common,
    /// Column that names the source: its passages are drawn again together [default: each row is a source]
    #[arg(long, value_name = "COLUMN")]
    pub(super) source: Option<String>,
    /// Passages of each row
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub(super) passages: usize,
    /// Tokens of a passage
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub(super) tokens: usize,
    /// Reset prefixes to try beside none, with |, as score.reset_prefix has them
    #[arg(long, value_name = "LIST", value_delimiter = '|', default_value = "bos|document|separator:\\n\\n|local:8")]
    pub(super) prefixes: Vec<String>,
    #[command(flatten)]
    pub(super) drawing: Drawing,
    /// Instruction model of the prompted method: a GGUF file of the llama architecture [default: the pipeline's model]
    #[arg(long, value_name = "MODEL")]
    pub(super) prompt_model: Option<String>,
    /// Seed of the random method, and of what is drawn
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) seed: u64,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(super) struct SectionArgs {
    /// Pipeline file (.toml), or a file of documents, with the columns sentences (texts) and masses (sentences of each section)
    #[command(flatten)]
    pub(super) common: Common,
    /// Documents of the same form that thresholds are chosen on
    #[arg(long, value_name = "PATH")]
    pub(super) calibration: String,
    #[command(flatten)]
    pub(super) drawing: Drawing,
    /// Seed of what is drawn
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) seed: u64,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Subcommand)]
pub(super) enum StreamsCommand {
    /// Join records that resemble each other by one space, for calibrate and eval: calibration.jsonl, evaluation.jsonl (gold: record_byte_starts) and build.json
    Build(StreamsArgs),
}

#[derive(Debug, ClapArgs)]
pub(super) struct StreamsArgs {
    /// Files, folders or globs of records (Parquet, JSONL, Arrow)
    #[arg(required = true)]
    pub(super) records: Vec<String>,
    /// Folder for the streams
    #[arg(long, value_name = "DIR")]
    pub(super) output: PathBuf,
    /// Column that holds the text
    #[arg(long, value_name = "COLUMN", default_value = "text")]
    pub(super) text_column: String,
    /// Column that identifies a record
    #[arg(long, value_name = "COLUMN")]
    pub(super) id_column: Option<String>,
    /// Column that names the domain: records are joined with others of theirs alone
    #[arg(long, value_name = "COLUMN")]
    pub(super) domain: Option<String>,
    /// What makes records alike: an encoder, as score.encoder has them, or words (tf-idf, no model)
    #[arg(long, value_name = "NAME", default_value = "minilm-l6")]
    pub(super) likeness: String,
    /// Fewest words of a record
    #[arg(long, value_name = "N", default_value_t = 60)]
    pub(super) min_words: usize,
    /// Most words of a record
    #[arg(long, value_name = "N", default_value_t = 250)]
    pub(super) max_words: usize,
    /// Most streams of a domain
    #[arg(long, value_name = "N")]
    pub(super) streams: Option<usize>,
    /// Share of the streams that are for calibration
    #[arg(long, value_name = "SHARE", default_value_t = 0.2, value_parser = share_of_one)]
    pub(super) calibration: f64,
    /// Everything drawn follows from it
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) seed: u64,
    /// Set each stream as a page (pango-view), make a picture of it at so many dots per inch, and read it back (tesseract)
    #[arg(long, value_name = "DPI", value_parser = clap::value_parser!(u32).range(50..=1200))]
    pub(super) render: Option<u32>,
    /// Replace streams that are there
    #[arg(long)]
    pub(super) force: bool,
}

fn named_file(text: &str) -> Result<(String, PathBuf), String> {
    let parts = text.split_once('=').filter(|(name, file)| !name.is_empty() && !file.is_empty());
    parts.map(|(name, file)| (name.to_owned(), file.into())).ok_or_else(|| "write NAME=FILE, such as mine=chunks.parquet".to_owned())
}

fn share_of_one(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|v| (0.0..=1.0).contains(v)).ok_or_else(|| "a share lies between 0 and 1".to_owned())
}

/// What `calibrate` and `eval` share.
#[derive(Debug, ClapArgs)]
pub(super) struct Judging {
    #[command(flatten)]
    pub(super) common: Common,
    /// Column that holds the byte at which each true unit begins: a list of integers, or JSON
    #[arg(long, value_name = "COLUMN")]
    pub(super) gold: String,
    /// Column that names the domain: documents are drawn again within theirs
    #[arg(long, value_name = "COLUMN")]
    pub(super) domain: Option<String>,
    /// Methods, with commas: pipeline, standard, thorough, paper; rr, lr, kl, embed and sums such as rr+0.5embed; comparators, see docs/evidence.md; prompted [default: pipeline, rr, lr, embed, rr+lr and all comparators but prompted]
    #[arg(long, value_name = "LIST", value_delimiter = ',', hide_default_value = true)]
    pub(super) methods: Vec<Method>,
    /// Instruction model of the prompted method: a GGUF file of the llama architecture [default: the pipeline's model]
    #[arg(long, value_name = "MODEL")]
    pub(super) prompt_model: Option<String>,
    /// Seed of the random method, and of what is drawn
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) seed: u64,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(super) struct CalibrateArgs {
    #[command(flatten)]
    pub(super) judging: Judging,
    /// Choose the weights of sums too, among 0.25, 0.5, 1 and 2 for every readout but the first
    #[arg(long)]
    pub(super) fusion: bool,
    /// TOML file for what is found, to be given to run and eval with --overlay [default: standard output]
    #[arg(long, value_name = "FILE")]
    pub(super) output: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
pub(super) struct EvalArgs {
    #[command(flatten)]
    pub(super) judging: Judging,
    /// Chunks made elsewhere, to be compared too: a file with doc_id and byte_start, and what to call them
    #[arg(long, value_name = "NAME=FILE", value_parser = named_file)]
    pub(super) chunks: Vec<(String, PathBuf)>,
    /// Method that differences are taken from [default: embed, else the first]
    #[arg(long, value_name = "METHOD")]
    pub(super) baseline: Option<String>,
    #[command(flatten)]
    pub(super) drawing: Drawing,
}

/// What a sweep does about documents without scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum SweepOnMiss {
    /// Leave them out and say how many
    Skip,
    /// Score them first
    Score,
}

#[derive(Debug, Subcommand)]
pub(super) enum ModelsCommand {
    /// List the built-in models
    List,
    /// Fetch a built-in model, or any org/name[@revision] of the Hugging Face hub
    Fetch { name: String },
    /// Show what is known of a model
    Show { name: String },
}

#[derive(Debug, Subcommand)]
pub(super) enum CacheCommand {
    /// Count records by namespace
    Stats { pipeline: Option<PathBuf> },
    /// Check every record
    Verify { pipeline: Option<PathBuf> },
    /// Print its folder
    Path { pipeline: Option<PathBuf> },
    /// Write all records to a Parquet file, the form to archive
    Export { file: PathBuf },
    /// Take the records of exported files
    Import {
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Take the records of other caches, such as those of ranks
    Merge {
        #[arg(required = true, value_name = "DIR")]
        folders: Vec<PathBuf>,
    },
    /// Remove records by model, readout and last use, and give their space back
    Prune {
        /// Of this model: its name, or the beginning of the hash of its weights or tokenizer
        #[arg(long)]
        model: Option<String>,
        /// Of this readout, or edges
        #[arg(long)]
        readout: Option<String>,
        /// Not used for this time, such as 90d
        #[arg(long, value_name = "TIME")]
        unused_for: Option<Time>,
        /// Only say what would be removed
        #[arg(long)]
        dry_run: bool,
    },
    /// Write the databases anew, without what is unsound or was set aside: this gives space back
    Compact,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum SchemaName {
    Pipeline,
    Chunks,
    Edges,
    Summary,
    Manifest,
}

/// A length of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Time(pub(super) Duration);

impl FromStr for Time {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no time; write 90d, 4h, 30m, 90s or 1h30m");
        let mut seconds = 0_u64;
        let mut rest = text;
        while !rest.is_empty() {
            let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
            let number: u64 = rest[..digits].parse().map_err(|_| wrong())?;
            let unit = match rest[digits..].chars().next() {
                Some('d') => 86_400,
                Some('h') => 3600,
                Some('m') => 60,
                Some('s') => 1,
                _ => return Err(wrong()),
            };
            seconds = number.checked_mul(unit).and_then(|s| seconds.checked_add(s)).ok_or_else(wrong)?;
            rest = &rest[digits + 1..];
        }
        if seconds == 0 { Err(wrong()) } else { Ok(Self(Duration::from_secs(seconds))) }
    }
}

/// Penalties of a sweep.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Penalties(pub(super) Vec<f64>);

impl FromStr for Penalties {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |t: &str| t.trim().parse::<f64>().ok().filter(|v| v.is_finite()).ok_or_else(|| format!("{t:?} is no number"));
        let parts: Vec<&str> = text.split(':').collect();
        if let [from, to, step] = parts[..] {
            let (from, to, step) = (number(from)?, number(to)?, number(step)?);
            let count = ((to - from) / step + 1e-9).floor();
            if step <= 0.0 || !(0.0..10_000.0).contains(&count) {
                return Err("FROM:TO:STEP needs FROM <= TO and a STEP above 0 that gives at most 10,000 penalties".into());
            }
            // To the digits of the step, so that 0.80:0.98:0.02 gives 0.86 and not 0.8600000000000001.
            return Ok(Self((0..=count as u32).map(|i| ((from + f64::from(i) * step) * 1e9).round() / 1e9).collect()));
        }
        if parts.len() != 1 {
            return Err("write FROM:TO:STEP, such as 0.80:0.98:0.02, or a list such as 0.9,0.95".into());
        }
        text.split(',').map(number).collect::<Result<_, _>>().map(Self)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn times_and_ranges_parse() {
        assert_eq!("1h30m".parse::<Time>().unwrap().0.as_secs(), 5400);
        assert!(["", "4", "h", "3x", "0s"].iter().all(|t| t.parse::<Time>().is_err()));
        assert_eq!("0.80:0.88:0.02".parse::<Penalties>().unwrap().0, [0.8, 0.82, 0.84, 0.86, 0.88]);
        assert_eq!("0.9,1".parse::<Penalties>().unwrap().0, [0.9, 1.0]);
        assert!(["1:0:0.1", "0:1:0", "a", "0:1"].iter().all(|t| t.parse::<Penalties>().is_err()));
    }

    #[test]
    fn the_command_line_is_sound() {
        <Args as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn a_share_is_given_by_number_or_by_slurm() {
        let parts = |rank, world_size| Parts { output: None, checksum: false, prune: false, force: false, rank, world_size };
        let none = |_: &str| None;
        assert_eq!(parts(None, None).share(none), Ok(None));
        assert_eq!(parts(Some(RankArg::Number(1)), Some(4)).share(none), Ok(Some(Rank { rank: 1, world: 4 })));
        assert!(parts(Some(RankArg::Number(4)), Some(4)).share(none).unwrap_err().contains("count from 0"));
        assert!(parts(Some(RankArg::Number(0)), None).share(none).unwrap_err().contains("--world-size"));
        let slurm = |name: &str| {
            let value = match name {
                "SLURM_ARRAY_TASK_ID" => "14",
                "SLURM_ARRAY_TASK_MIN" => "10",
                "SLURM_ARRAY_TASK_STEP" => "2",
                "SLURM_ARRAY_TASK_COUNT" => "5",
                _ => return None,
            };
            Some(value.to_owned())
        };
        assert_eq!(parts(Some(RankArg::Slurm), None).share(slurm), Ok(Some(Rank { rank: 2, world: 5 })));
        assert!(parts(Some(RankArg::Slurm), None).share(none).unwrap_err().contains("SLURM_ARRAY_TASK_ID"));
        assert!("x".parse::<RankArg>().is_err());
    }
}
