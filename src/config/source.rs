//! The file a configuration comes from, and how its changes are seen.

use std::path::{Path, PathBuf};

use super::problem::{LoadError, Place, Problem};
use super::{Config, parse};

/// The file that a configuration is read from.
#[derive(Clone, Debug)]
pub struct Source {
    path: PathBuf,
}

/// What was in the file at one moment.
#[derive(Clone, Debug)]
pub struct Reading {
    name: String,
    content: Result<Vec<u8>, String>,
}

/// Sees every change of a [`Source`] by looking at its content, whatever way it
/// is made: written in place, renamed over, deleted and made anew, or by a
/// symbolic link on the way to it that leads elsewhere, as Kubernetes changes a
/// `ConfigMap`.
#[derive(Debug)]
pub struct Watch {
    source: Source,
    /// What was last given out, and what has been seen once since.
    given: Fingerprint,
    candidate: Option<Fingerprint>,
}

/// What a look at a [`Source`] shows.
#[derive(Debug)]
pub enum Look {
    /// Nothing new.
    Same,
    /// Something new that may not be complete yet: to be looked at again soon.
    Settling,
    /// Something new that was the same when it was looked at before.
    Changed(Reading),
}

/// A hash of the content, or why it cannot be read.
type Fingerprint = Result<String, String>;

impl Source {
    /// The file at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the file.
    pub fn read(&self) -> Reading {
        Reading {
            name: self.path.display().to_string(),
            content: std::fs::read(&self.path).map_err(|error| error.to_string()),
        }
    }
}

impl Reading {
    /// The configuration in the file; `env` looks up the environment.
    ///
    /// # Errors
    /// If the file could not be read, or with everything that is wrong with it.
    pub fn parse(&self, env: &dyn Fn(&str) -> Option<String>) -> Result<Config, LoadError> {
        let whole = |place: Option<Place>, message: String| {
            LoadError::new(&self.name, vec![Problem { place, path: String::new(), message }])
        };
        let bytes =
            self.content.as_ref().map_err(|e| whole(None, format!("cannot be read: {e}")))?;
        let text = std::str::from_utf8(bytes).map_err(|error| {
            let valid = String::from_utf8_lossy(&bytes[..error.valid_up_to()]);
            let line = valid.bytes().filter(|b| *b == b'\n').count() + 1;
            let column = valid.chars().rev().take_while(|c| *c != '\n').count() + 1;
            whole(Some(Place { line, column }), "is not UTF-8 text".to_owned())
        })?;
        parse(&self.name, text, env)
    }

    fn fingerprint(&self) -> Fingerprint {
        self.content.as_ref().map(|bytes| hash(bytes)).map_err(Clone::clone)
    }
}

impl Watch {
    /// Watches `source`, from which the configuration with this
    /// [hash](Config::hash) was read.
    pub fn new(source: Source, hash: &str) -> Self {
        Self { source, given: Ok(hash.to_owned()), candidate: None }
    }

    /// Looks at the file. What is new is given out once, when two looks in a row
    /// show the same: one alone may have come in the middle of a write.
    pub fn look(&mut self) -> Look {
        let reading = self.source.read();
        let seen = reading.fingerprint();
        if seen == self.given {
            self.candidate = None;
            return Look::Same;
        }
        if self.candidate.as_ref() != Some(&seen) {
            self.candidate = Some(seen);
            return Look::Settling;
        }
        self.candidate = None;
        self.given = seen;
        Look::Changed(reading)
    }

    /// Gives out what is in the file now, new or not.
    pub fn take(&mut self) -> Reading {
        let reading = self.source.read();
        self.candidate = None;
        self.given = reading.fingerprint();
        reading
    }
}

/// By which two contents of a file are told apart, 32 hexadecimal digits.
pub(super) fn hash(content: &[u8]) -> String {
    let hash = blake3::hash(content).to_hex();
    hash.as_str()[..32].to_owned()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    /// Looks until the file is at rest.
    fn settled(watch: &mut Watch) -> Look {
        match watch.look() {
            Look::Settling => watch.look(),
            look @ (Look::Same | Look::Changed(_)) => look,
        }
    }

    fn changed(watch: &mut Watch) -> String {
        let Look::Changed(reading) = settled(watch) else { panic!("nothing new") };
        assert!(matches!(settled(watch), Look::Same), "given out once");
        reading.content.map_or_else(|e| e, |bytes| String::from_utf8(bytes).unwrap())
    }

    fn watch(path: &Path) -> Watch {
        let mut watch = Watch::new(Source::new(path), &hash(&fs::read(path).unwrap()));
        assert!(matches!(watch.look(), Look::Same));
        watch
    }

    #[test]
    fn cf_g1_every_usual_way_to_change_a_file_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("limits.yaml");
        fs::write(&file, "one").unwrap();
        let mut watch = watch(&file);

        let new = dir.path().join("new.tmp");
        fs::write(&new, "two").unwrap();
        fs::rename(&new, &file).unwrap();
        assert_eq!(changed(&mut watch), "two");

        fs::write(&file, "three").unwrap();
        assert_eq!(changed(&mut watch), "three");

        fs::remove_file(&file).unwrap();
        assert!(matches!(watch.look(), Look::Settling));
        fs::write(&file, "four").unwrap();
        assert_eq!(changed(&mut watch), "four");

        // The same size and time of change do not hide it.
        let times = fs::metadata(&file).unwrap().modified().unwrap();
        fs::write(&file, "five").unwrap();
        fs::File::options().write(true).open(&file).unwrap().set_modified(times).unwrap();
        assert_eq!(changed(&mut watch), "five");
    }

    #[test]
    fn cf_g1_a_config_map_is_followed_through_its_links() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for (version, text) in [("..1", "one"), ("..2", "two")] {
            fs::create_dir(at(version)).unwrap();
            fs::write(at(version).join("limits.yaml"), text).unwrap();
        }
        symlink("..1", at("..data")).unwrap();
        symlink("..data/limits.yaml", at("limits.yaml")).unwrap();
        let mut watch = watch(&at("limits.yaml"));
        symlink("..2", at("..data_tmp")).unwrap();
        fs::rename(at("..data_tmp"), at("..data")).unwrap();
        fs::remove_dir_all(at("..1")).unwrap();
        assert_eq!(changed(&mut watch), "two");
    }

    #[test]
    fn a_write_that_is_under_way_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("limits.yaml");
        fs::write(&file, "one").unwrap();
        let mut watch = watch(&file);
        for part in ["", "t", "tw"] {
            fs::write(&file, part).unwrap();
            assert!(matches!(watch.look(), Look::Settling), "{part}");
        }
        fs::write(&file, "two").unwrap();
        assert_eq!(changed(&mut watch), "two");
        // One that ends where it began was none.
        fs::write(&file, "tw").unwrap();
        assert!(matches!(watch.look(), Look::Settling));
        fs::write(&file, "two").unwrap();
        assert!(matches!(watch.look(), Look::Same));
    }

    #[test]
    fn a_file_that_stays_away_is_an_error_once() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("limits.yaml");
        fs::write(&file, "one").unwrap();
        let mut watch = watch(&file);
        fs::remove_file(&file).unwrap();
        let Look::Changed(reading) = settled(&mut watch) else { panic!("nothing new") };
        let error = reading.parse(&|_| None).unwrap_err().to_string();
        assert!(error.contains("limits.yaml: cannot be read: "), "{error}");
        assert!(matches!(settled(&mut watch), Look::Same));
        fs::write(&file, "one").unwrap();
        assert_eq!(changed(&mut watch), "one");
        assert!(watch.take().content.is_ok() && matches!(watch.look(), Look::Same));
    }
}
