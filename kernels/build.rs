//! Compiles the kernels, one fatbin an operation, and embeds them; or says that it cannot.
//!
//! Looks for nvcc in `$NVCC`, then on `PATH`. Without one the crate builds all the same, with `kernels::AVAILABLE == false`; a
//! kernel that does not compile is an error.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// What check.sh compiles with too. The one architecture: wgmma and setmaxnreg exist only in its `a` variant.
const FLAGS: &str = include_str!("nvcc.flags");

fn main() -> Result<()> {
    println!("cargo::rerun-if-changed=cuda");
    println!("cargo::rerun-if-env-changed=NVCC");
    println!("cargo::rerun-if-env-changed=PATH");
    println!("cargo::rustc-check-cfg=cfg(have_kernels)");
    let Some(nvcc) = find_nvcc() else {
        println!(
            "cargo::warning=no nvcc in $NVCC or on PATH: building without CUDA kernels, the CPU engine is unaffected"
        );
        return Ok(());
    };
    let out_dir = PathBuf::from(std::env::var_os("OUT_DIR").context("cargo sets OUT_DIR")?);
    let fatbins = compile(&nvcc, &sources(Path::new("cuda"))?, &out_dir)?;
    // kernels/src/lib.rs includes this: `(operation, image)`, by name.
    let mut table = String::from("&[");
    for fatbin in fatbins {
        let operation = fatbin.file_stem().unwrap_or_default().to_string_lossy();
        writeln!(table, "({operation:?}, include_bytes!({:?})),", fatbin.display().to_string())?;
    }
    std::fs::write(out_dir.join("images.rs"), table + "]")?;
    println!("cargo::rustc-cfg=have_kernels");
    Ok(())
}

fn find_nvcc() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("NVCC").filter(|name| !name.is_empty()) {
        return Some(named.into());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join("nvcc")).find(|candidate| candidate.is_file())
}

/// `cuda/NAME/NAME.cu` of every operation, in a fixed order. `cuda/ptx` holds headers only.
fn sources(root: &Path) -> Result<Vec<PathBuf>> {
    let mut sources = Vec::new();
    for folder in std::fs::read_dir(root).context("cuda/ beside build.rs")? {
        let folder = folder?.path();
        let name = folder.file_name().unwrap_or_default();
        let source = folder.join(name).with_extension("cu");
        if source.is_file() {
            sources.push(source);
        }
    }
    sources.sort();
    Ok(sources)
}

/// Fatbins of all sources, in their order. Those that are older than a file they were made of are compiled, two at a time: each nvcc
/// takes a second or a few, on one core.
fn compile(nvcc: &Path, sources: &[PathBuf], out_dir: &Path) -> Result<Vec<PathBuf>> {
    let of = |source: &PathBuf| out_dir.join(source.file_name().unwrap_or_default()).with_extension("fatbin");
    let fatbins: Vec<PathBuf> = sources.iter().map(of).collect();
    let outdated: Vec<_> = sources.iter().zip(&fatbins).filter(|(_, fatbin)| !is_current(nvcc, fatbin)).collect();
    for batch in outdated.chunks(2) {
        let mut running = Vec::new();
        for (source, fatbin) in batch {
            // Under its own name only when whole: an interrupted build leaves no fatbin that looks current.
            let unfinished = fatbin.with_extension("unfinished");
            let child = Command::new(nvcc)
                .arg("-fatbin")
                .args(FLAGS.split_whitespace())
                .args(["-MMD", "-MF"])
                .arg(dependencies(fatbin))
                .arg("-o")
                .arg(&unfinished)
                .arg(source)
                .spawn()
                .with_context(|| format!("{} does not start", nvcc.display()))?;
            running.push((source, fatbin, unfinished, child));
        }
        for (source, fatbin, unfinished, mut child) in running {
            let status = child.wait()?;
            if !status.success() {
                bail!("nvcc fails on {}: {status}", source.display());
            }
            std::fs::rename(unfinished, fatbin)?;
        }
    }
    Ok(fatbins)
}

/// Where nvcc lists the files that a fatbin was made of.
fn dependencies(fatbin: &Path) -> PathBuf {
    fatbin.with_extension("d")
}

/// Whether a fatbin is newer than its sources, the compiler and this program.
fn is_current(nvcc: &Path, fatbin: &Path) -> bool {
    let changed = |path: &Path| std::fs::metadata(path).and_then(|file| file.modified());
    let Ok(listed) = std::fs::read_to_string(dependencies(fatbin)) else { return false };
    // `target : file \ file ..`, as for make.
    let Some((_, files)) = listed.split_once(" : ") else { return false };
    let sources = files.split_whitespace().filter(|word| *word != "\\").map(Path::new);
    let Ok(made) = changed(fatbin) else { return false };
    sources
        .chain([Path::new("build.rs"), Path::new("nvcc.flags"), nvcc])
        .all(|source| changed(source).is_ok_and(|at| at < made))
}
