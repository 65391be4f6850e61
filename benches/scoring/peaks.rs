//! What the processor's arithmetic units can do, from registers alone, all threads at once.
#![allow(unsafe_code)]

use std::time::Instant;

/// A unit and the operations per second that it was measured to do, a multiplication and an addition counted as two.
pub struct Peak {
    pub name: &'static str,
    pub per_second: f64,
}

/// A unit's name, and what runs so many rounds of it and says how many operations that was.
type Unit = (&'static str, fn(u64) -> f64);

/// Every unit this processor has.
pub fn peaks(threads: usize) -> Vec<Peak> {
    let mut units: Vec<Unit> = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            units.push(("f32 multiply-add, AVX-512", x86::f32_512));
        } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            units.push(("f32 multiply-add, AVX2", x86::f32_256));
        }
        if is_x86_feature_detected!("avx512bf16") {
            units.push(("bf16 dot, AVX-512", x86::bf16_512));
        }
        if is_x86_feature_detected!("avx512vnni") {
            units.push(("int8 dot, AVX-512", x86::int8_512));
        }
        if x86::tiles() {
            units.push(("bf16 tiles", x86::bf16_tiles));
            units.push(("int8 tiles", x86::int8_tiles));
        }
    }
    let measure = |run: fn(u64) -> f64| {
        let once = |rounds: u64| {
            let began = Instant::now();
            let done: f64 = std::thread::scope(|scope| {
                let all: Vec<_> = (0..threads).map(|_| scope.spawn(move || run(rounds))).collect();
                all.into_iter().map(|t| t.join().expect("no panic")).sum()
            });
            done / began.elapsed().as_secs_f64()
        };
        once(1_000_000);
        (0..3).map(|_| once(20_000_000)).fold(0.0, f64::max)
    };
    units.into_iter().map(|(name, run)| Peak { name, per_second: measure(run) }).collect()
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;
    use std::arch::x86_64::*;
    use std::hint::black_box;

    macro_rules! peak {
        ($name:ident, $features:literal, $count:literal, $ops:expr, $zero:expr, $step:expr) => {
            /// Runs so many rounds, and says how many operations that was.
            pub fn $name(rounds: u64) -> f64 {
                #[target_feature(enable = $features)]
                fn run(rounds: u64) {
                    let mut sums = [$zero; $count];
                    let (a, b) = (black_box($zero), black_box($zero));
                    for _ in 0..rounds {
                        for sum in &mut sums {
                            *sum = $step(*sum, a, b);
                        }
                    }
                    black_box(sums);
                }
                // SAFETY: the caller has looked whether the processor has these instructions.
                unsafe { run(rounds) };
                rounds as f64 * f64::from($count) * $ops
            }
        };
    }

    peak!(f32_512, "avx512f", 12, 32.0, _mm512_setzero_ps(), |s, a, b| _mm512_fmadd_ps(a, b, s));
    peak!(f32_256, "avx2,fma", 12, 16.0, _mm256_setzero_ps(), |s, a, b| _mm256_fmadd_ps(a, b, s));
    // SAFETY: the types differ in name alone.
    peak!(bf16_512, "avx512f,avx512bf16", 12, 64.0, _mm512_setzero_ps(), |s, a: __m512, b: __m512| unsafe {
        _mm512_dpbf16_ps(s, std::mem::transmute::<__m512, __m512bh>(a), std::mem::transmute::<__m512, __m512bh>(b))
    });
    peak!(int8_512, "avx512f,avx512vnni", 12, 128.0, _mm512_setzero_si512(), |s, a, b| _mm512_dpbusd_epi32(s, a, b));

    /// Whether there are tiles that the system lets us use.
    pub fn tiles() -> bool {
        let leaf = __cpuid(0).eax;
        let bits = 1 << 22 | 1 << 24 | 1 << 25;
        if !cfg!(target_os = "linux") || leaf < 7 || __cpuid_count(7, 0).edx & bits != bits {
            return false;
        }
        let result: isize;
        // SAFETY: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) touches no memory of the process.
        unsafe {
            asm!("syscall", inlateout("rax") 158_isize => result, in("rdi") 0x1023, in("rsi") 18, out("rcx") _, out("r11") _, options(nostack));
        }
        result == 0
    }

    macro_rules! tile_peak {
        ($name:ident, $multiply:literal, $depth:literal) => {
            /// Runs so many rounds, and says how many operations that was.
            pub fn $name(rounds: u64) -> f64 {
                #[repr(C, align(64))]
                struct Config([u8; 64]);
                let mut config = Config([0; 64]);
                config.0[0] = 1;
                for tile in 0..8 {
                    config.0[16 + 2 * tile] = 64;
                    config.0[48 + tile] = 16;
                }
                let rounds = rounds / 8;
                // SAFETY: tiles were found and allowed; the configuration is valid.
                unsafe {
                    asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly));
                    asm!(
                        "tilezero tmm0",
                        "tilezero tmm1",
                        "tilezero tmm2",
                        "tilezero tmm3",
                        "tilezero tmm4",
                        "tilezero tmm5",
                        "tilezero tmm6",
                        "tilezero tmm7",
                        options(nostack, nomem)
                    );
                    for _ in 0..rounds {
                        asm!(
                            concat!($multiply, " tmm0, tmm4, tmm6"),
                            concat!($multiply, " tmm1, tmm4, tmm7"),
                            concat!($multiply, " tmm2, tmm5, tmm6"),
                            concat!($multiply, " tmm3, tmm5, tmm7"),
                            options(nostack, nomem)
                        );
                    }
                    asm!("tilerelease", options(nostack, nomem));
                }
                rounds as f64 * 4.0 * 2.0 * 16.0 * 16.0 * $depth
            }
        };
    }

    tile_peak!(bf16_tiles, "tdpbf16ps", 32.0);
    tile_peak!(int8_tiles, "tdpbssd", 64.0);
}
