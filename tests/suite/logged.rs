//! Warnings that the crate logs. They are those of the whole process, because tests run next to
//! each other.

use std::sync::{Mutex, Once};

struct Warnings(Mutex<Vec<String>>);

static WARNINGS: Warnings = Warnings(Mutex::new(Vec::new()));

impl log::Log for Warnings {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::Level::Warn
    }

    fn log(&self, record: &log::Record<'_>) {
        self.0.lock().unwrap().push(record.args().to_string());
    }

    fn flush(&self) {}
}

/// Runs `program`, and returns the warnings so far that contain `part`.
pub fn warnings(part: &str, program: impl FnOnce()) -> Vec<String> {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        log::set_logger(&WARNINGS).unwrap();
        log::set_max_level(log::LevelFilter::Warn);
    });
    program();
    WARNINGS
        .0
        .lock()
        .unwrap()
        .iter()
        .filter(|text| text.contains(part))
        .cloned()
        .collect()
}
