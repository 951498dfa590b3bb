//! How a test says that it does not run, in every crate whose tests need GPUs.
//!
//! A machine that has no GPU passes all the same, so a gate that must have GPUs says how many: `DAMASK_TEST_GPUS=2`. Then a test that
//! needs no more fails rather than skip itself, be it for want of a GPU, of NCCL or of nvcc at the build.

use std::fmt::Display;

/// GPUs that `DAMASK_TEST_GPUS` promises.
pub(crate) fn promised() -> u32 {
    std::env::var("DAMASK_TEST_GPUS").map_or(0, |gpus| gpus.parse().expect("DAMASK_TEST_GPUS is a number"))
}

/// Says why a test that needs so many GPUs does not run.
///
/// # Panics
/// Where as many are promised.
pub(crate) fn skip(gpus: u32, reason: impl Display) {
    assert!(gpus > promised(), "DAMASK_TEST_GPUS={}, and yet: {reason}", promised());
    eprintln!("skipped: {reason}");
}
