//! Compiles the kernels, one fatbin an operation, and embeds them; or says that it cannot.
//!
//! Looks for nvcc in `$NVCC`, then on `PATH`. Without one the crate builds all the same, with `kernels::AVAILABLE == false`; a
//! kernel that does not compile is an error.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The one architecture: wgmma and setmaxnreg exist only in its `a` variant.
const ARCHITECTURE: &str = "-gencode=arch=compute_90a,code=sm_90a";

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

/// Two at a time: each nvcc takes a second or a few, on one core.
fn compile(nvcc: &Path, sources: &[PathBuf], out_dir: &Path) -> Result<Vec<PathBuf>> {
    let mut fatbins = Vec::new();
    for batch in sources.chunks(2) {
        let mut running = Vec::new();
        for source in batch {
            let fatbin = out_dir.join(source.file_name().unwrap_or_default()).with_extension("fatbin");
            let child = Command::new(nvcc)
                .args(["-fatbin", "-std=c++17", "-O3", "-lineinfo", ARCHITECTURE, "-Icuda", "-o"])
                .arg(&fatbin)
                .arg(source)
                .spawn()
                .with_context(|| format!("{} does not start", nvcc.display()))?;
            running.push((source, child));
            fatbins.push(fatbin);
        }
        for (source, mut child) in running {
            let status = child.wait()?;
            if !status.success() {
                bail!("nvcc fails on {}: {status}", source.display());
            }
        }
    }
    Ok(fatbins)
}
