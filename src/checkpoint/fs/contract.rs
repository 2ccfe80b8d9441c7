//! The contract of [`FileSystem`], and the helpers over it.

use std::io::{self, ErrorKind};
use std::path::Path;
use std::thread;

use super::{Entry, FileSystem, Links, read_all, real, remove_dir_all, write_atomically};
use crate::checkpoint::tests::folder::Folder;

/// Asserts that a call failed with an error of that kind that names the path.
#[track_caller]
fn fails<T>(result: io::Result<T>, kind: ErrorKind, path: &Path) {
    let error = result.err().expect("an error");
    assert_eq!(error.kind(), kind, "{error}");
    assert!(
        error.to_string().contains(path.to_str().unwrap()),
        "{error}"
    );
}

fn write(fs: &dyn FileSystem, file: &Path, bytes: &[u8]) {
    let mut writer = fs.create(file).unwrap();
    let (left, right) = bytes.split_at(bytes.len() / 2);
    writer.write_all(left).unwrap();
    writer.write_all(right).unwrap();
    writer.sync().unwrap();
}

fn read(fs: &dyn FileSystem, file: &Path) -> Vec<u8> {
    read_all(fs, file, Links::Refuse, 1 << 20).unwrap()
}

fn names(fs: &dyn FileSystem, dir: &Path) -> Vec<String> {
    fs.list(dir)
        .unwrap()
        .into_iter()
        .map(|entry| entry.name)
        .collect()
}

/// Asserts that a file system keeps the contract in an empty folder of its own.
fn keeps_contract(fs: &dyn FileSystem, root: &Path) {
    let a = root.join("a");
    let b = root.join("b");
    let missing = root.join("missing");
    let inside = root.join("a/b/c");
    assert_eq!(fs.list(root).unwrap(), []);
    fails(fs.create_dir(&inside), ErrorKind::NotFound, &inside);
    fs.create_dir_all(&inside).unwrap();
    fs.create_dir_all(&inside).unwrap();
    fails(fs.create_dir(&inside), ErrorKind::AlreadyExists, &inside);
    write(fs, &b, b"12345");
    fails(fs.create(&b), ErrorKind::AlreadyExists, &b);
    fails(fs.create(&a), ErrorKind::AlreadyExists, &a);
    fails(fs.create(&missing.join("x")), ErrorKind::NotFound, &missing);
    fails(fs.create_dir_all(&b), ErrorKind::AlreadyExists, &b);
    fails(
        fs.create_dir_all(&b.join("x")),
        ErrorKind::NotADirectory,
        &b,
    );
    let entry = |name: &str, is_dir| Entry {
        name: name.into(),
        is_dir,
    };
    assert_eq!(
        fs.list(root).unwrap(),
        [entry("a", true), entry("b", false)]
    );
    assert_eq!(
        [&a, &b, &missing].map(|path| fs.is_dir(path, Links::Refuse).unwrap()),
        [true, false, false]
    );

    fails(fs.open(&a, Links::Refuse), ErrorKind::InvalidInput, &a);
    fails(
        fs.open(&missing, Links::Refuse),
        ErrorKind::NotFound,
        &missing,
    );
    let reader = fs.open(&b, Links::Refuse).unwrap();
    assert_eq!(reader.len().unwrap(), 5);
    let range = |offset, len| {
        let mut bytes = vec![0; len];
        reader.read_exact_at(&mut bytes, offset).map(|()| bytes)
    };
    assert_eq!(
        [
            range(0, 5).unwrap(),
            range(3, 2).unwrap(),
            range(5, 0).unwrap()
        ],
        [&b"12345"[..], b"45", b""]
    );
    fails(range(3, 3), ErrorKind::UnexpectedEof, &b);
    fails(range(9, 1), ErrorKind::UnexpectedEof, &b);
    thread::scope(|scope| {
        for at in 0..5 {
            scope.spawn(move || {
                (0..100).for_each(|_| assert_eq!(range(at, 1).unwrap(), [b'1' + at as u8]))
            });
        }
    });
    fails(
        read_all(fs, &b, Links::Refuse, 4),
        ErrorKind::FileTooLarge,
        &b,
    );
    assert_eq!(read_all(fs, &b, Links::Refuse, 5).unwrap(), b"12345");

    write(fs, &inside.join("new"), b"new");
    fs.rename(&inside.join("new"), &b).unwrap();
    assert_eq!(read(fs, &b), b"new");
    assert_eq!(
        range(0, 5).unwrap(),
        b"12345",
        "a file that was replaced is read to its end"
    );
    fails(fs.rename(&missing, &b), ErrorKind::NotFound, &missing);

    write_atomically(fs, &b, b"atomic").unwrap();
    write(fs, &root.join("b.tmp"), b"of a process that was killed");
    write_atomically(fs, &b, b"").unwrap();
    assert_eq!(
        (names(fs, root), read(fs, &b)),
        (vec!["a".into(), "b".into()], vec![])
    );
    fails(
        write_atomically(fs, &a, b"in place of a folder"),
        ErrorKind::IsADirectory,
        &a,
    );
    assert_eq!(names(fs, root), ["a", "b"], "nothing is left by a failure");

    fails(fs.remove_dir(&a), ErrorKind::DirectoryNotEmpty, &a);
    fails(fs.remove_dir(&b), ErrorKind::NotADirectory, &b);
    fails(fs.sync_dir(&b), ErrorKind::NotADirectory, &b);
    fails(fs.sync_dir(&missing), ErrorKind::NotFound, &missing);
    fails(fs.remove_file(&missing), ErrorKind::NotFound, &missing);
    fails(fs.list(&missing), ErrorKind::NotFound, &missing);
    let full = root.join("full");
    let empty = root.join("empty");
    fs.create_dir(&full).unwrap();
    write(fs, &full.join("x"), b"x");
    fs.create_dir(&empty).unwrap();
    fails(fs.rename(&a, &full), ErrorKind::DirectoryNotEmpty, &full);
    fails(fs.rename(&a, &b), ErrorKind::NotADirectory, &b);
    fails(fs.rename(&b, &empty), ErrorKind::IsADirectory, &empty);
    fs.rename(&full, &empty).unwrap();
    assert_eq!(names(fs, root), ["a", "b", "empty"]);
    let moved = root.join("moved");
    fs.rename(&empty, &moved).unwrap();
    assert_eq!(read(fs, &moved.join("x")), b"x");
    remove_dir_all(fs, &moved).unwrap();

    remove_dir_all(fs, &a).unwrap();
    fails(remove_dir_all(fs, &a), ErrorKind::NotFound, &a);
    fails(remove_dir_all(fs, &b), ErrorKind::NotADirectory, &b);
    fs.remove_file(&b).unwrap();
    assert_eq!(fs.list(root).unwrap(), []);
}

#[test]
fn the_real_file_system_keeps_the_contract() {
    let folder = Folder::new("fs-real");
    keeps_contract(&*real(), &folder.0);
}

#[test]
fn paths_without_a_folder_are_in_the_current_one() {
    assert_eq!(
        ["a", "./a", "a/b", "/a", "/"].map(|path| super::parent(Path::new(path)).to_str().unwrap()),
        [".", ".", "a", "/", "/"]
    );
}

/// In a checkpoint from elsewhere, links lead out of the folder and pipes are waited for.
#[cfg(target_os = "linux")]
#[test]
fn links_pipes_and_names_that_are_not_text() {
    use std::ffi::{CString, OsStr};
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;

    let folder = Folder::new("fs-links");
    let fs = real();
    let path = |name: &str| folder.0.join(name);
    let outside = path("outside");
    let target = path("outside/kept");
    fs.create_dir(&outside).unwrap();
    write(&*fs, &target, b"kept");
    let run = path("run");
    let link = path("run/link");
    let loose = path("loose");
    fs.create_dir(&run).unwrap();
    symlink(&target, &link).unwrap();
    symlink(&outside, path("run/outside")).unwrap();
    symlink(&outside, &loose).unwrap();

    fails(
        fs.open(&link, Links::Refuse),
        ErrorKind::InvalidInput,
        &link,
    );
    assert_eq!(read_all(&*fs, &link, Links::Follow, 4).unwrap(), b"kept");
    fails(fs.create(&link), ErrorKind::AlreadyExists, &link);
    assert_eq!(
        [Links::Refuse, Links::Follow].map(|links| fs.is_dir(&loose, links).unwrap()),
        [false, true]
    );
    assert!(
        fs.list(&run).unwrap().iter().all(|entry| !entry.is_dir),
        "a link to a folder is not one"
    );
    fails(
        remove_dir_all(&*fs, &loose),
        ErrorKind::InvalidInput,
        &loose,
    );
    // A checkpoint's folder may be on another disk.
    fs.create_dir_all(&loose.join("step-1")).unwrap();
    fs.remove_dir(&outside.join("step-1")).unwrap();

    let pipe = path("run/pipe");
    let name = CString::new(pipe.as_os_str().as_bytes()).unwrap();
    // SAFETY: the name is a C string.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    fails(
        fs.open(&pipe, Links::Follow),
        ErrorKind::InvalidInput,
        &pipe,
    );

    remove_dir_all(&*fs, &run).unwrap();
    assert_eq!(read(&*fs, &target), b"kept");
    std::fs::write(outside.join(OsStr::from_bytes(b"\xff")), b"").unwrap();
    assert_eq!(names(&*fs, &outside), ["kept", "\u{fffd}"]);
}

#[test]
fn the_recorder_keeps_the_contract() {
    let recorder = super::recorder::Recorder::new();
    recorder.create_dir(Path::new("/root")).unwrap();
    keeps_contract(&recorder, Path::new("/root"));
}
