//! The arguments.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};

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
    /// Write the score of every candidate edge
    Score(ScoreArgs),
    /// Show what other cut penalties would give, from the cache alone
    Sweep(SweepArgs),
    /// Models: list, fetch, show
    Models {
        #[command(subcommand)]
        command: ModelsCommand,
    },
    /// The score cache: count, check, or say where it is
    Cache {
        #[arg(value_enum)]
        command: CacheCommand,
        /// Pipeline whose cache is meant
        pipeline: Option<PathBuf>,
        /// Folder of the cache
        #[arg(long, value_name = "DIR")]
        path: Option<PathBuf>,
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
    /// Output folder, or - for standard output; replaces output.path
    #[arg(long, value_name = "DIR")]
    pub(super) output: Option<String>,
    /// Hash inputs even if their size and time are unchanged
    #[arg(long)]
    pub(super) checksum: bool,
    /// Remove the parts of inputs that are no longer listed
    #[arg(long)]
    pub(super) prune: bool,
    /// Find the penalty of segment.target_mean_tokens anew
    #[arg(long)]
    pub(super) recalibrate: bool,
    /// Stop cleanly after this time, such as 4h or 30m; exit code 75
    #[arg(long, value_name = "TIME")]
    pub(super) stop_after: Option<Time>,
    /// Progress on standard error
    #[arg(long, value_enum, default_value = "auto")]
    pub(super) progress: ProgressKind,
    /// Show the first N chunks of the output at the end
    #[arg(long, value_name = "N")]
    pub(super) show: Option<usize>,
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

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum CacheCommand {
    /// Count records by namespace
    Stats,
    /// Check every record
    Verify,
    /// Print its folder
    Path,
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
        let wrong = || format!("{text:?} is no time; write 4h, 30m, 90s or 1h30m");
        let mut seconds = 0_u64;
        let mut rest = text;
        while !rest.is_empty() {
            let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
            let number: u64 = rest[..digits].parse().map_err(|_| wrong())?;
            let unit = match rest[digits..].chars().next() {
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
}
