//! The engine: worker threads that turn waiting full passes and reset windows of all documents into batches.
//!
//! A worker takes, in this order: a full batch of windows, waiting full passes up to the token budget, or what windows there are. So
//! batches are full while documents keep coming, and the states of few documents are alive at once. Windows of later stages go first.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use futures::channel::oneshot;

use super::curve::{Curve, Growing, Knots, curve};
use super::stages::{damage_per_token, survivors};
use super::{Readout, ScoreError, ScoreSpec};
use crate::model::ops::{self, Head, HeadScratch};
use crate::model::{Batch, Past, Scratch, Tap, Trunk};

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
    /// Windows of the current stage that are not done.
    left: usize,
    /// Of the first stage's, those of each segment.
    left_of: Vec<usize>,
    /// The next segment to begin.
    next: usize,
    stage: usize,
    /// Windows that wait for the others of their stage.
    waiting: Vec<Run>,
    /// Candidates that have a score, once the first stage is done.
    all: usize,
    reply: Option<oneshot::Sender<Result<Vec<EdgeCurves>, ScoreError>>>,
}

/// The full pass of one segment.
struct Pass {
    job: Arc<Job>,
    /// Index into the job's segments.
    segment: usize,
}

/// One reset window of a document on its way.
struct Window {
    job: Arc<Job>,
    run: Run,
}

/// How far a window is, and the states it is compared with.
struct Run {
    segment: usize,
    edge: usize,
    full: Arc<FullStates>,
    /// Row of the states at which the document's segment begins.
    base: usize,
    stage: usize,
    /// Tokens of the window that have been scored.
    done: u32,
    /// The curve of LR so far.
    lr: Growing,
    kept: Option<Kept>,
}

/// What a window left behind for its next stage.
struct Kept {
    past: Past,
    /// Final-normed state of its last token.
    last: Vec<f32>,
    _reserved: Reserved,
}

/// Memory that is taken while it lives.
struct Reserved {
    used: Arc<AtomicUsize>,
    bytes: usize,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
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
    knots: Knots,
    stage_memory: usize,
    kept_bytes: Arc<AtomicUsize>,
    queue: Mutex<Queue>,
    wake: Condvar,
    counters: Counters,
}

/// How an engine works: none of it changes a score.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineOptions {
    /// Worker threads.
    pub threads: usize,
    /// Tokens of a batch at most (one window or one full pass at least).
    pub batch_tokens: usize,
    /// Bytes that windows may keep between stages; over it, a window is run again from its start.
    pub stage_memory: usize,
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
    /// Starts the workers.
    ///
    /// # Errors
    /// [`ScoreError::Settings`] if the specification does not fit itself or a thread cannot be started.
    pub fn new(trunk: Arc<dyn Trunk>, spec: ScoreSpec, options: EngineOptions) -> Result<Self, ScoreError> {
        spec.validate()?;
        if spec.readouts.need_head() && trunk.head().is_none() {
            return Err(ScoreError::Settings("LR and KL need the model's output head, which was not loaded".into()));
        }
        let shared = Arc::new(Shared {
            trunk,
            knots: Knots::new(spec.window, spec.skip),
            spec,
            budget: options.batch_tokens.max(1),
            stage_memory: options.stage_memory,
            kept_bytes: Arc::default(),
            queue: Mutex::default(),
            wake: Condvar::new(),
            counters: Counters::default(),
        });
        let spawn = |i| {
            let shared = Arc::clone(&shared);
            let body = move || shared.work();
            std::thread::Builder::new().name(format!("score-{i}")).spawn(body)
        };
        let threads = (0..options.threads.max(1)).map(spawn).collect::<Result<Vec<_>, _>>();
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
        // As many segments as there are threads: the states of no more are alive at a time.
        let begun = segments.len().min(self.threads.len());
        let left_of: Vec<usize> =
            segments.iter().map(|(_, range)| range.clone().filter(|&e| spec.scores(document.edges[e], n)).count()).collect();
        let left = left_of.iter().sum();
        let progress =
            Mutex::new(Progress { curves, left, left_of, next: begun, stage: 0, waiting: Vec::new(), all: 0, reply: Some(reply) });
        let job = Arc::new(Job { document, segments, progress });
        lock(&self.shared.queue).passes.extend((0..begun).map(|segment| Pass { job: Arc::clone(&job), segment }));
        self.shared.wake.notify_all();
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

    /// Tokens of a window that its stage runs to: its document may end before the stage's horizon.
    fn stage_end(&self, job: &Job, run: &Run) -> u32 {
        let document = &job.document;
        self.spec.window_at(document.edges[run.edge], document.ids.len() as u32).min(self.spec.horizon(run.stage))
    }

    /// Tokens that go through the network for a window's stage.
    fn window_tokens(&self, window: &Window) -> usize {
        let end = self.stage_end(&window.job, &window.run) as usize;
        if window.run.kept.is_some() { end - window.run.done as usize } else { end + self.spec.prefix.len() }
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
    fn forward(&self, batch: &Batch, past: &mut [Option<Past>], scratch: &mut Scratch) -> Result<(Vec<f32>, Vec<f32>), ScoreError> {
        self.counters.forward_tokens.fetch_add(batch.ids.len() as u64, Ordering::Relaxed);
        self.counters.batches.fetch_add(1, Ordering::Relaxed);
        let last = self.spec.readouts.need_head().then_some(Tap::Final);
        let taps: Vec<Tap> = self.spec.readouts.rr.into_iter().chain(last).collect();
        let mut states = self.trunk.resume(batch, past, &taps, scratch)?.into_iter();
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
        let (rr, normed) = self.forward(&batch, &mut [], &mut scratch.model)?;
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
            ready.extend(self.edges_of(&pass).map(|edge| {
                let (full, segment, base) = (Arc::clone(&full), pass.segment, span.start);
                let run = Run { segment, edge, full, base, stage: 0, done: 0, lr: Growing::default(), kept: None };
                Window { job: Arc::clone(&pass.job), run }
            }));
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

    /// Memory for what a window of so many tokens, the prefix included, leaves behind; none if there is no more.
    fn reserve(&self, tokens: usize) -> Option<Reserved> {
        let bytes = (self.trunk.past_floats(tokens) + self.trunk.shape().hidden) * size_of::<f32>();
        let reserved = Reserved { used: Arc::clone(&self.kept_bytes), bytes };
        let before = self.kept_bytes.fetch_add(bytes, Ordering::Relaxed);
        (before + bytes <= self.stage_memory).then_some(reserved)
    }

    fn run_windows(&self, mut windows: Vec<Window>, scratch: &mut Buffers) -> Result<(), ScoreError> {
        let hidden = self.trunk.shape().hidden;
        let mut batch = Batch::default();
        // What each window left behind, and will leave: entries of the batch's sequences.
        let (mut past, mut kept, mut places) = (Vec::new(), Vec::new(), Vec::new());
        for Window { job, run } in &mut windows {
            let (end, from) = (self.stage_end(job, run) as usize, run.kept.as_ref().map_or(0, |_| run.done as usize));
            let (tokens, before) = self.spec.reset_pass(&job.document.ids, job.document.edges[run.edge]);
            let skipped = if from > 0 { before + from } else { 0 };
            batch.push(tokens.skip(skipped).take(before + end - skipped));
            let goes_on = run.stage < self.spec.stages.len() && end < self.window_of(job, run) as usize;
            let reserved = if goes_on { self.reserve(before + end) } else { None };
            let (own, last) = run.kept.take().map_or((None, None), |kept| (Some(kept.past), Some(kept.last)));
            past.push(own.or_else(|| reserved.is_some().then(Past::default)));
            kept.push(reserved);
            places.push((from, before, end, last));
        }
        let (reset, normed) = self.forward(&batch, &mut past, &mut scratch.model)?;
        // Row of the first token of each window that ran now.
        let firsts: Vec<usize> = batch.sequences().zip(&places).map(|(s, p)| s.start + if p.0 > 0 { 0 } else { p.1 }).collect();

        // Rows of the batch that predict a token of their window not yet scored, beside the rows of the full pass that do. The first such token after an
        // earlier stage is predicted by the state that this stage left.
        let (mut log, mut divergence) = (Vec::new(), Vec::new());
        if let Some(head) = self.head() {
            let (mut states, mut targets, mut full) = (Vec::new(), Vec::new(), Vec::new());
            for ((Window { job, run }, &first), (from, _, end, last)) in windows.iter().zip(&firsts).zip(&places) {
                let (at, b) = (self.full_row(job, run), job.document.edges[run.edge] as usize);
                for t in self.first_token().max(run.done as usize)..*end {
                    states.extend_from_slice(match last {
                        Some(last) if t == *from => last,
                        _ => &normed[(first + t - from - 1) * hidden..(first + t - from) * hidden],
                    });
                    targets.push(job.document.ids[b + t]);
                    if self.spec.readouts.kl {
                        full.extend_from_slice(&run.full.normed[(at + t - 1) * hidden..(at + t) * hidden]);
                    }
                }
            }
            if self.spec.readouts.lr {
                log = head.log_probabilities(&states, &targets, &mut scratch.head)?;
            }
            if self.spec.readouts.kl {
                divergence = head.divergences(&full, &states, &mut scratch.head)?;
            }
        }
        let (mut log, mut divergence) = (log.into_iter(), divergence.into_iter());

        let sequences: Vec<_> = batch.sequences().collect();
        let left = past.into_iter().zip(kept).zip(sequences);
        for (((window, first), (_, _, end, _)), ((past, reserved), span)) in windows.into_iter().zip(firsts).zip(places).zip(left) {
            let Window { job, mut run } = window;
            let (b, n) = (job.document.edges[run.edge], job.document.ids.len() as u32);
            let (at, m, done) = (self.full_row(&job, &run), self.window_of(&job, &run), run.done as usize);
            let mut curves = EdgeCurves::default();
            if self.spec.gives(Readout::Rr, b, n) {
                let full = run.full.rr[at * hidden..].chunks_exact(hidden);
                let reset = reset[first * hidden..span.end * hidden].chunks_exact(hidden);
                let terms: Vec<f64> = reset.zip(full).map(|(r, h)| ops::cosine(h, r)).collect();
                curves.rr = curve(&terms, self.spec.skip);
            }
            // The first token of a window without a prefix has no term: nothing predicts it.
            let none = self.first_token().saturating_sub(done).min(end - done);
            let mut terms = vec![0.0; end - done];
            if self.spec.readouts.lr {
                for ((t, term), reset) in (done..).zip(&mut terms).skip(none).zip(&mut log) {
                    *term = run.full.log[at + t - 1] - reset;
                }
                if self.spec.gives(Readout::Lr, b, n) {
                    run.lr.add(&terms, m, self.spec.skip);
                }
            }
            if self.spec.readouts.kl {
                terms[none..].iter_mut().zip(&mut divergence).for_each(|(term, found)| *term = found);
                if self.spec.gives(Readout::Kl, b, n) {
                    curves.kl = curve(&terms, self.spec.skip);
                }
            }
            if job.failed() {
                continue;
            }
            if ![&curves.rr, &run.lr.curve, &curves.kl].into_iter().flatten().all(|v| v.is_finite()) {
                job.fail(ScoreError::NotFinite { edge: b });
                continue;
            }
            run.done = end as u32;
            run.kept = past.zip(reserved).map(|(past, reserved)| {
                let last = normed[(span.end - 1) * hidden..span.end * hidden].to_vec();
                Kept { past, last, _reserved: reserved }
            });
            self.finish(job, run, curves);
        }
        Ok(())
    }

    /// Tokens of a window in its last stage.
    fn window_of(&self, job: &Job, run: &Run) -> u32 {
        self.spec.window_at(job.document.edges[run.edge], job.document.ids.len() as u32)
    }

    /// The first token of a window that a row of its pass predicts.
    fn first_token(&self) -> usize {
        usize::from(self.spec.prefix.is_empty())
    }

    /// Row of a window's first token among the states of its full pass.
    fn full_row(&self, job: &Job, run: &Run) -> usize {
        run.base + self.spec.full_row(job.document.edges[run.edge], job.document.ids.len() as u32)
    }

    /// Takes what a window gave; the last of a segment starts a next segment, the last of a stage the next stage, the last of all answers.
    fn finish(&self, job: Arc<Job>, run: Run, curves: EdgeCurves) {
        let mut progress = lock(&job.progress);
        let (edge, segment) = (run.edge, run.segment);
        progress.curves[edge] = curves;
        if self.spec.stages.is_empty() {
            progress.curves[edge].lr = run.lr.curve;
        } else {
            progress.waiting.push(run);
        }
        progress.left -= 1;
        if progress.stage == 0 {
            progress.left_of[segment] -= 1;
            if progress.left_of[segment] == 0 && progress.next < job.segments.len() {
                let pass = Pass { job: Arc::clone(&job), segment: progress.next };
                progress.next += 1;
                lock(&self.queue).passes.push_back(pass);
                self.wake.notify_one();
            }
        }
        if progress.left > 0 {
            return;
        }
        let next = self.next_stage(&job, &mut progress);
        if next.is_empty() {
            let Progress { curves, reply, .. } = &mut *progress;
            if let Some(reply) = reply.take() {
                // Nobody waits any more: nothing to report to.
                let _ = reply.send(Ok(std::mem::take(curves)));
            }
            return;
        }
        progress.left = next.len();
        drop(progress);
        let windows: Vec<Window> = next.into_iter().map(|run| Window { job: Arc::clone(&job), run }).collect();
        let tokens: usize = windows.iter().map(|w| self.window_tokens(w)).sum();
        let mut queue = lock(&self.queue);
        if !queue.closed {
            windows.into_iter().rev().for_each(|window| queue.windows.push_front(window));
            queue.window_tokens += tokens;
        }
        drop(queue);
        self.wake.notify_all();
    }

    /// Ends a stage: the windows that run on in the next one, or in the first after it in which any does; none after the last stage.
    fn next_stage(&self, job: &Job, progress: &mut Progress) -> Vec<Run> {
        let n = job.document.ids.len() as u32;
        let mut runs = std::mem::take(&mut progress.waiting);
        runs.sort_unstable_by_key(|run| run.edge);
        if progress.stage == 0 {
            progress.all = runs.iter().filter(|run| !run.lr.curve.is_empty()).count();
        }
        while let Some(stage) = self.spec.stages.get(progress.stage) {
            let damage = |run: &Run| damage_per_token(&self.knots, &run.lr.curve, n - job.document.edges[run.edge], stage.horizon);
            let damages = runs.iter().enumerate().filter(|(_, run)| !run.lr.curve.is_empty()).map(|(i, run)| (i, damage(run)));
            let mut chosen = survivors(damages, stage.keep, progress.all).into_iter().peekable();
            progress.stage += 1;
            let mut next = Vec::new();
            for (i, mut run) in std::mem::take(&mut runs).into_iter().enumerate() {
                if chosen.next_if_eq(&i).is_none() {
                    progress.curves[run.edge].lr = run.lr.curve;
                } else {
                    run.stage = progress.stage;
                    // A window that its document's end has cut off is through.
                    if run.done < self.window_of(job, &run) { next.push(run) } else { runs.push(run) }
                }
            }
            if !next.is_empty() {
                progress.waiting = runs;
                return next;
            }
        }
        for run in runs {
            progress.curves[run.edge].lr = run.lr.curve;
        }
        Vec::new()
    }
}
