//! The engine: worker threads that turn waiting full passes and reset windows of all documents into batches.
//!
//! A worker takes, in this order: a full batch of windows, waiting full passes up to the token budget, or what windows there are. So
//! batches are full while documents keep coming, and the states of few documents are alive at once.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use futures::channel::oneshot;

use super::curve::{Curve, curve};
use super::{Readout, ScoreError, ScoreSpec};
use crate::model::ops::{self, Head, HeadScratch};
use crate::model::{Batch, Scratch, Tap, Trunk};

/// A document to score.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// Its tokens.
    pub ids: Vec<u32>,
    /// Edges to score, ascending, each above 0 and below the number of tokens.
    pub edges: Vec<u32>,
}

/// The curves of one edge; empty for what was not asked for and where the edge has no score.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct EdgeCurves {
    /// Cosines.
    pub rr: Curve,
    /// Damages, in nats: positive where the removed prefix made the tokens likelier.
    pub lr: Curve,
    /// Divergences, in nats.
    pub kl: Curve,
}

impl EdgeCurves {
    /// The curve of a readout; none of one that is not of the reset pass.
    #[must_use]
    pub fn get(&self, readout: Readout) -> &[f32] {
        match readout {
            Readout::Rr => &self.rr,
            Readout::Lr => &self.lr,
            Readout::Kl => &self.kl,
            Readout::Embed => &[],
        }
    }
}

/// What an engine has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct EngineStats {
    /// Document tokens scored.
    pub source_tokens: u64,
    /// Tokens that went through the network.
    pub forward_tokens: u64,
    /// Batches.
    pub batches: u64,
    /// Seconds during which at least one worker was at work.
    pub busy_seconds: f64,
}

#[derive(Default)]
struct Counters {
    source_tokens: AtomicU64,
    forward_tokens: AtomicU64,
    batches: AtomicU64,
}

/// One document on its way.
struct Job {
    document: Document,
    /// Segments with edges, and the range of edges that each holds.
    segments: Vec<(u32, std::ops::Range<usize>)>,
    progress: Mutex<Progress>,
}

struct Progress {
    curves: Vec<EdgeCurves>,
    /// Windows of the current segment that are not done.
    left: usize,
    reply: Option<oneshot::Sender<Result<Vec<EdgeCurves>, ScoreError>>>,
}

/// The full pass of one segment.
struct Pass {
    job: Arc<Job>,
    /// Index into the job's segments.
    segment: usize,
}

/// One reset window, with the states it is compared with.
struct Window {
    job: Arc<Job>,
    segment: usize,
    edge: usize,
    full: Arc<FullStates>,
    /// Row of the states at which the document's segment begins.
    base: usize,
}

/// What a batch of full passes leaves for the windows to be compared with, row by row; empty where it is not asked for.
struct FullStates {
    /// States that RR reads.
    rr: Vec<f32>,
    /// Log-probability of the token that comes after each row.
    log: Vec<f64>,
    /// Final-normed states, for KL.
    normed: Vec<f32>,
}

/// Buffers of a worker.
#[derive(Default)]
struct Buffers {
    model: Scratch,
    head: HeadScratch,
}

#[derive(Default)]
struct Queue {
    passes: VecDeque<Pass>,
    windows: VecDeque<Window>,
    window_tokens: usize,
    closed: bool,
    active: usize,
    busy_since: Option<Instant>,
    busy_seconds: f64,
}

struct Shared {
    trunk: Arc<dyn Trunk>,
    spec: ScoreSpec,
    budget: usize,
    queue: Mutex<Queue>,
    wake: Condvar,
    counters: Counters,
}

enum Work {
    Passes(Vec<Pass>),
    Windows(Vec<Window>),
}

/// Scores documents on threads of its own. Dropping it abandons what is unfinished.
pub struct Engine {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    /// Starts `threads` workers; a batch holds up to `batch_tokens` tokens (one window or one full pass at least).
    ///
    /// # Errors
    /// [`ScoreError::Settings`] if the specification does not fit itself or a thread cannot be started.
    pub fn new(trunk: Arc<dyn Trunk>, spec: ScoreSpec, threads: usize, batch_tokens: usize) -> Result<Self, ScoreError> {
        spec.validate()?;
        if spec.readouts.need_head() && trunk.head().is_none() {
            return Err(ScoreError::Settings("LR and KL need the model's output head, which was not loaded".into()));
        }
        let shared = Arc::new(Shared {
            trunk,
            spec,
            budget: batch_tokens.max(1),
            queue: Mutex::default(),
            wake: Condvar::new(),
            counters: Counters::default(),
        });
        let spawn = |i| {
            let shared = Arc::clone(&shared);
            let body = move || shared.work();
            std::thread::Builder::new().name(format!("score-{i}")).spawn(body)
        };
        let threads = (0..threads.max(1)).map(spawn).collect::<Result<Vec<_>, _>>();
        match threads {
            Ok(threads) => Ok(Self { shared, threads }),
            Err(e) => Err(ScoreError::Settings(format!("cannot start a scoring thread: {e}"))),
        }
    }

    /// Scores a document: the curves of each edge.
    ///
    /// # Errors
    /// [`ScoreError`] of this document only; others go on.
    pub async fn score(&self, document: Document) -> Result<Vec<EdgeCurves>, ScoreError> {
        let receiver = self.submit(document);
        receiver.await.unwrap_or_else(|_| Err(ScoreError::Worker("the engine stopped".into())))
    }

    /// [`Self::score`] for callers outside an executor.
    ///
    /// # Errors
    /// As [`Self::score`].
    pub fn score_blocking(&self, document: Document) -> Result<Vec<EdgeCurves>, ScoreError> {
        futures::executor::block_on(self.score(document))
    }

    fn submit(&self, document: Document) -> oneshot::Receiver<Result<Vec<EdgeCurves>, ScoreError>> {
        let (reply, receiver) = oneshot::channel();
        let spec = &self.shared.spec;
        let n = document.ids.len() as u32;
        let mut segments: Vec<(u32, std::ops::Range<usize>)> = Vec::new();
        for (i, &b) in document.edges.iter().enumerate().filter(|&(_, &b)| spec.scores(b, n)) {
            let segment = spec.segment(b, n);
            match segments.last_mut() {
                Some((last, range)) if *last == segment => range.end = i + 1,
                _ => segments.push((segment, i..i + 1)),
            }
        }
        let curves = vec![EdgeCurves::default(); document.edges.len()];
        if segments.is_empty() {
            // The receiver is alive: it is returned below.
            let _ = reply.send(Ok(curves));
            return receiver;
        }
        self.shared.counters.source_tokens.fetch_add(u64::from(n), Ordering::Relaxed);
        let progress = Mutex::new(Progress { curves, left: 0, reply: Some(reply) });
        let job = Arc::new(Job { document, segments, progress });
        lock(&self.shared.queue).passes.push_back(Pass { job, segment: 0 });
        self.shared.wake.notify_one();
        receiver
    }

    /// Counts so far.
    #[must_use]
    pub fn stats(&self) -> EngineStats {
        let counters = &self.shared.counters;
        let queue = lock(&self.shared.queue);
        EngineStats {
            source_tokens: counters.source_tokens.load(Ordering::Relaxed),
            forward_tokens: counters.forward_tokens.load(Ordering::Relaxed),
            batches: counters.batches.load(Ordering::Relaxed),
            busy_seconds: queue.busy_seconds + queue.busy_since.map_or(0.0, |t| t.elapsed().as_secs_f64()),
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let mut queue = lock(&self.shared.queue);
        queue.closed = true;
        queue.passes.clear();
        queue.windows.clear();
        drop(queue);
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            // A worker catches panics of its work, so there is nothing to learn from its end.
            let _ = thread.join();
        }
    }
}

impl Job {
    fn fail(&self, error: ScoreError) {
        if let Some(reply) = lock(&self.progress).reply.take() {
            // Nobody waits any more: nothing to report to.
            let _ = reply.send(Err(error));
        }
    }

    fn failed(&self) -> bool {
        lock(&self.progress).reply.is_none()
    }
}

impl Shared {
    fn work(&self) {
        let mut scratch = Buffers::default();
        while let Some(work) = self.take() {
            let jobs: Vec<Arc<Job>> = match &work {
                Work::Passes(passes) => passes.iter().map(|p| Arc::clone(&p.job)).collect(),
                Work::Windows(windows) => windows.iter().map(|w| Arc::clone(&w.job)).collect(),
            };
            let run = AssertUnwindSafe(|| match work {
                Work::Passes(passes) => self.run_passes(passes, &mut scratch),
                Work::Windows(windows) => self.run_windows(windows, &mut scratch),
            });
            let failure = match std::panic::catch_unwind(run) {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some("it panicked; please report this".to_owned()),
            };
            if let Some(reason) = failure {
                scratch = Buffers::default();
                jobs.iter().for_each(|job| job.fail(ScoreError::Worker(reason.clone())));
            }
            self.done();
        }
    }

    /// Waits for work and takes it.
    fn take(&self) -> Option<Work> {
        let mut queue = lock(&self.queue);
        loop {
            if queue.closed {
                return None;
            }
            let work = if queue.window_tokens >= self.budget {
                Some(Work::Windows(self.take_windows(&mut queue)))
            } else if !queue.passes.is_empty() {
                Some(Work::Passes(self.take_passes(&mut queue)))
            } else if !queue.windows.is_empty() {
                Some(Work::Windows(self.take_windows(&mut queue)))
            } else {
                None
            };
            if let Some(work) = work {
                queue.active += 1;
                queue.busy_since.get_or_insert_with(Instant::now);
                return Some(work);
            }
            queue = self.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn done(&self) {
        let mut queue = lock(&self.queue);
        queue.active -= 1;
        if queue.active == 0
            && let Some(since) = queue.busy_since.take()
        {
            queue.busy_seconds += since.elapsed().as_secs_f64();
        }
    }

    fn window_tokens(&self, window: &Window) -> usize {
        let document = &window.job.document;
        let m = self.spec.window_at(document.edges[window.edge], document.ids.len() as u32);
        m as usize + self.spec.prefix.len()
    }

    fn take_windows(&self, queue: &mut Queue) -> Vec<Window> {
        let mut taken = Vec::new();
        let mut tokens = 0;
        while let Some(window) = queue.windows.front() {
            let more = self.window_tokens(window);
            if !taken.is_empty() && tokens + more > self.budget {
                break;
            }
            tokens += more;
            taken.extend(queue.windows.pop_front());
        }
        queue.window_tokens -= tokens;
        taken
    }

    fn pass_tokens(&self, pass: &Pass) -> usize {
        let start = (pass.job.segments[pass.segment].0 * self.spec.stride()) as usize;
        (pass.job.document.ids.len() - start).min(self.spec.room() as usize) + usize::from(self.spec.bos.is_some())
    }

    fn take_passes(&self, queue: &mut Queue) -> Vec<Pass> {
        let mut taken = Vec::new();
        let mut tokens = 0;
        while let Some(pass) = queue.passes.front() {
            let more = self.pass_tokens(pass);
            if !taken.is_empty() && tokens + more > self.budget {
                break;
            }
            tokens += more;
            taken.extend(queue.passes.pop_front());
        }
        taken
    }

    /// States that RR reads and final-normed states; empty where they are not asked for.
    fn forward(&self, batch: &Batch, scratch: &mut Scratch) -> Result<(Vec<f32>, Vec<f32>), ScoreError> {
        self.counters.forward_tokens.fetch_add(batch.ids.len() as u64, Ordering::Relaxed);
        self.counters.batches.fetch_add(1, Ordering::Relaxed);
        let last = self.spec.readouts.need_head().then_some(Tap::Final);
        let taps: Vec<Tap> = self.spec.readouts.rr.into_iter().chain(last).collect();
        let mut states = self.trunk.forward(batch, &taps, scratch)?.into_iter();
        let mut take = |wanted: bool| if wanted { states.next().unwrap_or_default() } else { Vec::new() };
        Ok((take(self.spec.readouts.rr.is_some()), take(last.is_some())))
    }

    /// The head, where a readout needs it.
    fn head(&self) -> Option<&Head> {
        self.trunk.head().filter(|_| self.spec.readouts.need_head())
    }

    /// The edges of a pass that have a score.
    fn edges_of<'a>(&'a self, pass: &'a Pass) -> impl Iterator<Item = usize> + 'a {
        let document = &pass.job.document;
        let n = document.ids.len() as u32;
        pass.job.segments[pass.segment].1.clone().filter(move |&e| self.spec.scores(document.edges[e], n))
    }

    fn run_passes(&self, passes: Vec<Pass>, scratch: &mut Buffers) -> Result<(), ScoreError> {
        let mut batch = Batch::default();
        for pass in &passes {
            batch.push(self.spec.full_pass(&pass.job.document.ids, pass.job.segments[pass.segment].0));
        }
        let (rr, normed) = self.forward(&batch, &mut scratch.model)?;
        let mut log = Vec::new();
        if let Some(head) = self.head().filter(|_| self.spec.readouts.lr) {
            log = vec![0.0; batch.ids.len()];
            let hidden = self.trunk.shape().hidden;
            // Rows that some window reads, with the tokens that come after them.
            let mut read = vec![false; batch.ids.len()];
            for (pass, span) in passes.iter().zip(batch.sequences()) {
                let document = &pass.job.document;
                let n = document.ids.len() as u32;
                for edge in self.edges_of(pass) {
                    let b = document.edges[edge];
                    let row = span.start + self.spec.full_row(b, n);
                    let m = self.spec.window_at(b, n) as usize;
                    read[row - usize::from(!self.spec.prefix.is_empty())..row + m - 1].fill(true);
                }
            }
            let rows: Vec<usize> = (0..read.len()).filter(|&row| read[row]).collect();
            let states: Vec<f32> = rows.iter().flat_map(|row| &normed[row * hidden..(row + 1) * hidden]).copied().collect();
            let targets: Vec<u32> = rows.iter().map(|row| batch.ids[row + 1]).collect();
            let found = head.log_probabilities(&states, &targets, &mut scratch.head)?;
            for (row, value) in rows.into_iter().zip(found) {
                log[row] = value;
            }
        }
        let normed = if self.spec.readouts.kl { normed } else { Vec::new() };
        let full = Arc::new(FullStates { rr, log, normed });
        let mut ready = Vec::new();
        for (pass, span) in passes.into_iter().zip(batch.sequences()) {
            let before = ready.len();
            ready.extend(self.edges_of(&pass).map(|edge| Window {
                job: Arc::clone(&pass.job),
                segment: pass.segment,
                edge,
                full: Arc::clone(&full),
                base: span.start,
            }));
            lock(&pass.job.progress).left = ready.len() - before;
        }
        let tokens: usize = ready.iter().map(|w| self.window_tokens(w)).sum();
        let mut queue = lock(&self.queue);
        if !queue.closed {
            queue.windows.extend(ready);
            queue.window_tokens += tokens;
        }
        drop(queue);
        self.wake.notify_all();
        Ok(())
    }

    fn run_windows(&self, windows: Vec<Window>, scratch: &mut Buffers) -> Result<(), ScoreError> {
        let hidden = self.trunk.shape().hidden;
        let mut batch = Batch::default();
        let mut skipped = Vec::with_capacity(windows.len());
        for window in &windows {
            let document = &window.job.document;
            let (tokens, before) = self.spec.reset_pass(&document.ids, document.edges[window.edge]);
            batch.push(tokens);
            skipped.push(before);
        }
        let (reset, normed) = self.forward(&batch, &mut scratch.model)?;
        let spans: Vec<_> = batch.sequences().zip(skipped).map(|(span, before)| span.start + before..span.end).collect();

        // Rows of the batch that predict a token of their window, beside the rows of the full pass that do.
        let (mut log, mut divergence) = (Vec::new(), Vec::new());
        if let Some(head) = self.head() {
            let mut pairs = Vec::new();
            for (window, span) in windows.iter().zip(&spans) {
                let at = self.full_row(window);
                pairs.extend((self.first_token()..span.len()).map(|t| (span.start + t - 1, window, at + t - 1)));
            }
            let states: Vec<f32> = pairs.iter().flat_map(|(row, ..)| &normed[row * hidden..(row + 1) * hidden]).copied().collect();
            if self.spec.readouts.lr {
                let targets: Vec<u32> = pairs.iter().map(|(row, ..)| batch.ids[row + 1]).collect();
                log = head.log_probabilities(&states, &targets, &mut scratch.head)?;
            }
            if self.spec.readouts.kl {
                let full: Vec<f32> =
                    pairs.iter().flat_map(|(_, window, row)| &window.full.normed[row * hidden..(row + 1) * hidden]).copied().collect();
                divergence = head.divergences(&full, &states, &mut scratch.head)?;
            }
        }
        let (mut log, mut divergence) = (log.into_iter(), divergence.into_iter());

        for (window, span) in windows.into_iter().zip(spans) {
            let document = &window.job.document;
            let (b, n) = (document.edges[window.edge], document.ids.len() as u32);
            let at = self.full_row(&window);
            let (m, first) = (span.len(), self.first_token());
            let mut curves = EdgeCurves::default();
            if self.spec.gives(Readout::Rr, b, n) {
                let full = window.full.rr[at * hidden..].chunks_exact(hidden);
                let reset = reset[span.start * hidden..span.end * hidden].chunks_exact(hidden);
                let terms: Vec<f64> = reset.zip(full).map(|(r, h)| ops::cosine(h, r)).collect();
                curves.rr = curve(&terms, self.spec.skip);
            }
            // The first token of a window without a prefix has no term: nothing predicts it.
            let mut terms = vec![0.0; m];
            if self.spec.readouts.lr {
                for ((t, term), reset) in terms.iter_mut().enumerate().skip(first).zip(&mut log) {
                    *term = window.full.log[at + t - 1] - reset;
                }
                if self.spec.gives(Readout::Lr, b, n) {
                    curves.lr = curve(&terms, self.spec.skip);
                }
            }
            if self.spec.readouts.kl {
                for (term, found) in terms[first.min(m)..].iter_mut().zip(&mut divergence) {
                    *term = found;
                }
                if self.spec.gives(Readout::Kl, b, n) {
                    curves.kl = curve(&terms, self.spec.skip);
                }
            }
            if window.job.failed() {
                continue;
            }
            if [&curves.rr, &curves.lr, &curves.kl].into_iter().flatten().all(|v| v.is_finite()) {
                self.finish(&window, curves);
            } else {
                window.job.fail(ScoreError::NotFinite { edge: b });
            }
        }
        Ok(())
    }

    /// The first token of a window that a row of its pass predicts.
    fn first_token(&self) -> usize {
        usize::from(self.spec.prefix.is_empty())
    }

    /// Row of a window's first token among the states of its full pass.
    fn full_row(&self, window: &Window) -> usize {
        let document = &window.job.document;
        window.base + self.spec.full_row(document.edges[window.edge], document.ids.len() as u32)
    }

    /// Stores curves; the last of a segment starts the next segment, the last of all answers.
    fn finish(&self, window: &Window, curves: EdgeCurves) {
        let mut progress = lock(&window.job.progress);
        progress.curves[window.edge] = curves;
        progress.left -= 1;
        if progress.left > 0 {
            return;
        }
        if window.segment + 1 < window.job.segments.len() {
            drop(progress);
            let pass = Pass { job: Arc::clone(&window.job), segment: window.segment + 1 };
            lock(&self.queue).passes.push_back(pass);
            self.wake.notify_one();
        } else if let Some(reply) = progress.reply.take() {
            // Nobody waits any more: nothing to report to.
            let _ = reply.send(Ok(std::mem::take(&mut progress.curves)));
        }
    }
}
