//! Programs that the compiler checks against the crate as it was built for these tests.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;
use std::{env, fs};

/// The libraries with which programs are checked.
pub struct Compiler {
    ours: PathBuf,
    burn: PathBuf,
    scratch: PathBuf,
}

impl Compiler {
    /// Finds the libraries next to this test. `name` is that of the test.
    pub fn new(name: &str) -> Self {
        let scratch = env::temp_dir().join(format!("burn-dtensor-{name}-{}", std::process::id()));
        fs::create_dir_all(&scratch).expect("a folder");
        // Of several builds the one that fits together.
        let pairs = built("burn_dtensor").into_iter().flat_map(|ours| {
            built("burn")
                .into_iter()
                .map(move |burn| (ours.clone(), burn))
        });
        let mut said = String::from("nothing is built");
        let both =
            "pub fn fit(x: burn::tensor::Tensor<2>) -> impl burn_dtensor::fsdp::TensorTree { x }";
        let found = pairs.map(|(ours, burn)| Self {
            ours,
            burn,
            scratch: scratch.clone(),
        });
        let fits = |compiler: &Self| compiler.check(both).map_err(|text| said = text).is_ok();
        let found = found.into_iter().find(fits);
        found.unwrap_or_else(|| panic!("no two libraries fit together: {said}"))
    }

    /// Checks a program. Returns what the compiler says if it is wrong.
    pub fn check(&self, program: &str) -> Result<(), String> {
        let source = self.scratch.join("program.rs");
        fs::write(&source, program).expect("it is written");
        let library = |name: &str, path: &Path| format!("{name}={}", path.display());
        let deps = format!(
            "dependency={}",
            self.ours.parent().expect("a folder").display()
        );
        let output = Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
            .args([
                "--edition",
                "2024",
                "--crate-type",
                "lib",
                "--emit",
                "metadata",
                "-L",
                &deps,
            ])
            .args([
                "--extern",
                &library("burn_dtensor", &self.ours),
                "--extern",
                &library("burn", &self.burn),
                "-o",
            ])
            .args([self.scratch.join("program.rmeta"), source])
            .output()
            .expect("tests are built by a compiler");
        if output.status.success() {
            Ok(())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).into_owned())
        }
    }

    /// Removes what the checks have written.
    pub fn finish(self) {
        fs::remove_dir_all(self.scratch).expect("it is removed");
    }
}

/// The libraries of this name next to this test, the newest first.
fn built(name: &str) -> Vec<PathBuf> {
    let test = env::current_exe().expect("it runs");
    let other = fs::read_dir(test.parent().expect("a folder"))
        .expect("it is read")
        .flatten()
        .map(|entry| entry.path());
    let is = |path: &PathBuf| {
        let file = path
            .file_name()
            .and_then(|file| file.to_str())
            .unwrap_or_default();
        file.starts_with(&format!("lib{name}-")) && file.ends_with(".rlib")
    };
    let mut found: Vec<_> = other.filter(is).collect();
    let age = |path: &PathBuf| {
        fs::metadata(path)
            .and_then(|data| data.modified())
            .unwrap_or(SystemTime::UNIX_EPOCH)
    };
    found.sort_by_key(|path| std::cmp::Reverse(age(path)));
    found
}
