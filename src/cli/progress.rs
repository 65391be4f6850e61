//! Progress on standard error: a bar on a terminal, a plain line every ten seconds elsewhere.

use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use right_reset::pipeline::Progress;

use super::args::ProgressKind;

/// Time between plain lines.
const EVERY: Duration = Duration::from_secs(10);

/// The reporter of a kind.
pub(super) fn reporter(kind: ProgressKind) -> Box<dyn Fn(Progress) + Send + Sync> {
    let terminal = std::io::stderr().is_terminal();
    match kind {
        ProgressKind::None => Box::new(|_| {}),
        ProgressKind::Bar => bar(),
        ProgressKind::Auto if terminal => bar(),
        ProgressKind::Auto | ProgressKind::Plain => {
            let last = Mutex::new(Instant::now());
            Box::new(move |progress| {
                let Ok(mut last) = last.lock() else { return };
                if last.elapsed() >= EVERY {
                    *last = Instant::now();
                    eprintln!("progress: {}", line(&progress));
                }
            })
        }
    }
}

fn bar() -> Box<dyn Fn(Progress) + Send + Sync> {
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {msg}") {
        bar.set_style(style);
    }
    Box::new(move |progress| {
        bar.set_message(line(&progress));
        bar.tick();
        if progress.files_done == progress.files {
            bar.finish_and_clear();
        }
    })
}

/// Takes a file, its bytes that are there, and all of them.
type Fetching = dyn FnMut(&str, u64, u64);

/// The reporter of a fetch: a bar per file on a terminal, a plain line every ten seconds elsewhere.
pub(super) fn fetching() -> Box<Fetching> {
    if !std::io::stderr().is_terminal() {
        let mut last = Instant::now();
        return Box::new(move |file, done, all| {
            if last.elapsed() >= EVERY {
                last = Instant::now();
                eprintln!("{file}: {} of {} MiB", done >> 20, all >> 20);
            }
        });
    }
    let bar = ProgressBar::new(0);
    if let Ok(style) = ProgressStyle::with_template("{msg} {bar:30} {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta}")
    {
        bar.set_style(style);
    }
    Box::new(move |file, done, all| {
        if bar.message() != file {
            bar.set_message(file.to_owned());
            bar.reset();
        }
        bar.set_length(all);
        bar.set_position(done);
    })
}

fn line(p: &Progress) -> String {
    let speed = if p.tokens_per_second > 0.0 { format!(", {:.0} tokens/s scored", p.tokens_per_second) } else { String::new() };
    format!(
        "file {} of {}, {} rows, {} documents from cache, {} scored, {} chunks{speed}",
        (p.files_done + 1).min(p.files),
        p.files,
        p.rows,
        p.from_cache,
        p.scored,
        p.chunks
    )
}
