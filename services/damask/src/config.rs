//! `damask config`: checks or prints a service's configuration.

use std::io::Write;
use std::path::{Path, PathBuf};

use chassis::config::{self, ConfigError, Validate};
use clap::{Args, Subcommand};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::serve::Role;

/// What to do with a configuration.
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Check a file, environment overrides included, and say what is wrong with it.
    Check(ConfigArgs),
    /// Print the configuration that a service would run with: the file, overrides and defaults.
    Print(ConfigArgs),
}

/// Which configuration.
#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    /// The service that the file is for.
    #[arg(value_enum)]
    service: Role,
    /// The YAML file.
    file: PathBuf,
}

impl ConfigCommand {
    /// # Errors
    /// What is wrong with the file.
    pub(crate) fn run(self) -> anyhow::Result<()> {
        match self {
            Self::Check(args) => {
                args.load()?;
                writeln!(std::io::stdout(), "{}: ok", args.file.display())?;
            }
            Self::Print(args) => write!(std::io::stdout(), "{}", args.load()?)?,
        }
        Ok(())
    }
}

impl ConfigArgs {
    fn load(&self) -> Result<String, ConfigError> {
        match self.service {
            Role::Gateway => load::<gateway::Config>(&self.file, self.service),
            Role::Router => load::<router::Config>(&self.file, self.service),
            Role::Prefill => load::<prefill::Config>(&self.file, self.service),
            Role::Decode => load::<decode::Config>(&self.file, self.service),
        }
    }
}

fn load<T: DeserializeOwned + Serialize + Validate>(file: &Path, role: Role) -> Result<String, ConfigError> {
    Ok(config::print(&config::load::<T>(file, role.name())?))
}
