//! [`Disk`]: contents of a file system, and [`Change`]s to them.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, ErrorKind};
use std::path::{Component, Path};
use std::sync::{Arc, OnceLock};

use super::settled;
use crate::checkpoint::fs::parent;

/// Index of a file or folder.
pub(super) type Inode = usize;

/// A file's bytes, or a folder's entries.
#[derive(Clone)]
pub(super) enum Node {
    File(Arc<HashedBytes>),
    Folder(Arc<BTreeMap<String, Inode>>),
}

/// A file's bytes, with their hash once it was needed: most crashes leave most files as they were.
#[derive(Default)]
pub(super) struct HashedBytes {
    pub bytes: Vec<u8>,
    hash: OnceLock<u64>,
}

impl HashedBytes {
    fn hash(&self) -> u64 {
        *self.hash.get_or_init(|| {
            let mut hasher = DefaultHasher::new();
            self.bytes.hash(&mut hasher);
            hasher.finish()
        })
    }
}

impl Node {
    pub fn folder() -> Self {
        Self::Folder(Arc::default())
    }

    pub fn file() -> Self {
        Self::File(Arc::default())
    }
}

/// Files and folders by inode, of which the first is the root. Nothing is freed: what has no name
/// cannot be found.
#[derive(Clone)]
pub(super) struct Disk {
    pub nodes: Vec<Node>,
}

impl Disk {
    pub fn folder(&self, inode: Inode) -> io::Result<&BTreeMap<String, Inode>> {
        match &self.nodes[inode] {
            Node::Folder(entries) => Ok(entries),
            Node::File(_) => Err(ErrorKind::NotADirectory.into()),
        }
    }

    fn folder_mut(&mut self, inode: Inode) -> &mut BTreeMap<String, Inode> {
        match &mut self.nodes[inode] {
            Node::Folder(entries) => Arc::make_mut(entries),
            Node::File(_) => unreachable!("entries are of folders"),
        }
    }

    pub fn file(&self, inode: Inode) -> &[u8] {
        match &self.nodes[inode] {
            Node::File(contents) => &contents.bytes,
            Node::Folder(_) => unreachable!("folders are not opened"),
        }
    }

    pub fn find(&self, path: &Path) -> io::Result<Inode> {
        names(path)?.into_iter().try_fold(0, |inode, name| {
            self.folder(inode)?
                .get(name)
                .copied()
                .ok_or_else(|| ErrorKind::NotFound.into())
        })
    }

    /// Returns the folder that holds the path's entry, and its name.
    pub fn place(&self, path: &Path) -> io::Result<(Inode, String)> {
        let names = names(path)?;
        let Some((name, _)) = names.split_last() else {
            return Err(ErrorKind::InvalidInput.into());
        };
        let folder = self.find(parent(path))?;
        self.folder(folder)?;
        Ok((folder, (*name).into()))
    }

    pub fn apply(&mut self, change: &Change) {
        match change {
            Change::Write {
                file,
                at,
                bytes: written,
            } => {
                let Node::File(contents) = &mut self.nodes[*file] else {
                    unreachable!("writes are to files")
                };
                let mut bytes = contents.bytes.clone();
                bytes.resize(bytes.len().max(at + written.len()), 0);
                bytes[*at..at + written.len()].copy_from_slice(written);
                *contents = Arc::new(HashedBytes {
                    bytes,
                    hash: OnceLock::new(),
                });
            }
            Change::Link {
                folder,
                name,
                inode,
            } => drop(self.folder_mut(*folder).insert(name.clone(), *inode)),
            Change::Unlink { folder, name } => drop(self.folder_mut(*folder).remove(name)),
            Change::Rename {
                from: (folder, name),
                to: (other, new),
                inode,
            } => {
                let entries = self.folder_mut(*folder);
                if entries.get(name) == Some(inode) {
                    entries.remove(name);
                }
                self.folder_mut(*other).insert(new.clone(), *inode);
            }
        }
    }

    /// Returns the paths from a folder of all in it, with their inodes, in order.
    pub fn walk(&self, folder: Inode) -> Vec<(String, Inode)> {
        let mut found = Vec::new();
        let mut open = vec![(String::new(), folder)];
        while let Some((path, inode)) = open.pop() {
            if let Node::Folder(entries) = &self.nodes[inode] {
                open.extend(
                    entries
                        .iter()
                        .rev()
                        .map(|(name, inode)| (format!("{path}/{name}"), *inode)),
                );
            }
            found.push((path, inode));
        }
        found
    }

    /// Returns a hash of all that can be found by name in a folder. Names that differ from save to
    /// save are hashed without the part that differs.
    pub fn digest(&self, folder: Inode) -> u64 {
        let mut hasher = DefaultHasher::new();
        for (path, inode) in self.walk(folder) {
            settled(&path).hash(&mut hasher);
            match &self.nodes[inode] {
                Node::File(contents) => contents.hash().hash(&mut hasher),
                Node::Folder(_) => hasher.write_u8(0),
            }
        }
        hasher.finish()
    }
}

fn names(path: &Path) -> io::Result<Vec<&str>> {
    let name = |component| match component {
        Component::RootDir | Component::CurDir => None,
        Component::Normal(name) => {
            Some(name.to_str().ok_or_else(|| ErrorKind::InvalidInput.into()))
        }
        Component::ParentDir | Component::Prefix(_) => Some(Err(ErrorKind::InvalidInput.into())),
    };
    path.components().filter_map(name).collect()
}

/// A change that is lost in a crash unless it was synced.
#[derive(Clone)]
pub(super) enum Change {
    Write {
        file: Inode,
        at: usize,
        bytes: Arc<[u8]>,
    },
    Link {
        folder: Inode,
        name: String,
        inode: Inode,
    },
    Unlink {
        folder: Inode,
        name: String,
    },
    Rename {
        from: (Inode, String),
        to: (Inode, String),
        inode: Inode,
    },
}

impl Change {
    /// Returns true if a sync of that file or folder makes the change durable.
    pub fn is_synced_with(&self, synced: Inode) -> bool {
        match self {
            Self::Write { file, .. } => *file == synced,
            Self::Link { folder, .. } | Self::Unlink { folder, .. } => *folder == synced,
            Self::Rename { from, to, .. } => [from.0, to.0].contains(&synced),
        }
    }

    /// Returns a write of which a part is done: `done` bytes, and zeros in place of the others if
    /// the file has its length.
    pub fn torn(&self, done: usize, zeros: bool) -> Self {
        let Self::Write { file, at, bytes } = self else {
            unreachable!("only writes are torn")
        };
        let mut torn = bytes[..done].to_vec();
        torn.resize(if zeros { bytes.len() } else { done }, 0);
        Self::Write {
            file: *file,
            at: *at,
            bytes: torn.into(),
        }
    }
}
