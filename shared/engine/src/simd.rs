//! Compiles one kernel body for several vector units and picks the widest that this CPU has.
//!
//! A kernel is plain Rust over `[f32; 16]` values ([`V`]) with loops of fixed length, which LLVM turns into vectors. Its arithmetic is spelled
//! out operation by operation ([`f32::mul_add`] where a fused multiply-add is meant), so each build of it rounds alike: results are equal bit
//! for bit on every path, and differ in speed only. Measured on one core of an AMD EPYC (Zen 5), `[96 x 320] x [320 x 640]`: 128 GMAC/s with
//! AVX-512, 58 with AVX2; without a fused multiply-add in hardware (x86-64 before 2013) it is emulated, 0.5.
#![allow(unsafe_code, reason = "calls functions compiled for vector units whose presence was checked")]

/// Floats in one vector.
pub(crate) const LANES: usize = 16;

/// The unit in which kernels compute.
pub(crate) type V = [f32; LANES];

/// A computation that may be compiled for any vector unit.
pub(crate) trait Kernel {
    /// What it yields.
    type Output;

    /// The body. Implementations must be `#[inline(always)]`, as must be all that they call, or the parts left out of line are compiled for
    /// the portable unit. `WIDE`: there are 32 registers of 16 lanes.
    fn run<const WIDE: bool>(self) -> Self::Output;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unit {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// A vector unit that this CPU has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Simd(Unit);

impl Simd {
    /// The widest unit.
    pub(crate) fn detect() -> Self {
        Self::available()[0]
    }

    /// All units that can be used here, the widest first.
    pub(crate) fn available() -> Vec<Self> {
        let mut units = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
            {
                units.push(Self(Unit::Avx512));
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                units.push(Self(Unit::Avx2));
            }
        }
        units.push(Self(Unit::Portable));
        units
    }

    /// The unit's name, for logs.
    pub(crate) const fn name(self) -> &'static str {
        match self.0 {
            Unit::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Unit::Avx2 => "avx2+fma",
            #[cfg(target_arch = "x86_64")]
            Unit::Avx512 => "avx512",
        }
    }

    /// Runs `kernel` as compiled for this unit.
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            Unit::Portable => kernel.run::<false>(),
            // SAFETY: a `Simd` of this unit is made by `available` alone, after it saw the features on this CPU.
            #[cfg(target_arch = "x86_64")]
            Unit::Avx2 => unsafe { run_avx2(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Unit::Avx512 => unsafe { run_avx512(kernel) },
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<false>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<true>()
}
