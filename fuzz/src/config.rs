//! Configuration files.

use tidegate::config::{Config, parse};

/// Reads a file; one that is accepted is written out with every default and read
/// again.
pub fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let env = |name: &str| match name {
        "ONE" => Some("1".to_owned()),
        "EMPTY" => Some(String::new()),
        "REFERENCE" => Some("${ONE}".to_owned()),
        _ => None,
    };
    match parse("fuzz.yaml", text, &env) {
        Ok(config) => accepted(&config),
        Err(error) => {
            assert!(!error.problems.is_empty());
            let lines = text.split(['\n', '\r', '\u{85}', '\u{2028}', '\u{2029}']).count();
            for problem in &error.problems {
                assert!(!problem.message.is_empty());
                match problem.place {
                    Some(place) => {
                        assert!(place.column >= 1, "{error}");
                        assert!((1..=lines + 1).contains(&place.line), "{error}");
                    }
                    None => assert!(problem.message.starts_with("more than"), "{error}"),
                }
            }
            // A line for each, whatever the file holds.
            assert_eq!(error.to_string().lines().count(), error.problems.len(), "{error}");
        }
    }
}

fn accepted(config: &Config) {
    let effective = config.effective();
    // Secrets are not told, so that such a file is not the same.
    if effective.contains("(secret)") {
        return;
    }
    let again = match parse("effective", &effective, &|_| None) {
        Ok(again) => again,
        Err(error) => panic!("{error}\n{effective}"),
    };
    assert_eq!(again.effective(), effective);
    assert!(config.needs_restart(&again).is_empty(), "{effective}");
    assert_eq!(limits(config), limits(&again), "{effective}");
}

/// All that limits are made of.
fn limits(config: &Config) -> Vec<String> {
    let limits = config.limits();
    let told = limits.iter().map(|(_, limit)| {
        format!(
            "{:?} {:?} {:?} {:?} {:?} {} {:?} {:?} {}",
            limit.name(),
            limit.identity(),
            limit.rule(),
            limit.default_quota(),
            limit.cost(),
            limit.overrides(),
            limit.mode(),
            limit.partition(),
            limit.exposed(),
        )
    });
    told.collect()
}
