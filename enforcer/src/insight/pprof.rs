//! Reports in pprof's format: gzip is optional there, and left out.
//!
//! The messages are those of `profile.proto` of google/pprof, as far as they are used here, with their field numbers.

use std::collections::HashMap;

use prost::Message;

use crate::control::leaks::LeakReport;

/// `perftools.profiles.ValueType`
#[derive(Clone, Copy, PartialEq, Message)]
pub struct ValueType {
    /// What is counted: an index into the strings, as all texts are.
    #[prost(int64, tag = "1")]
    pub kind: i64,
    /// In what.
    #[prost(int64, tag = "2")]
    pub unit: i64,
}

/// `perftools.profiles.Sample`
#[derive(Clone, PartialEq, Message)]
pub struct Sample {
    /// Where, the innermost first.
    #[prost(uint64, repeated, tag = "1")]
    pub location_id: Vec<u64>,
    /// How much of each of the sample types.
    #[prost(int64, repeated, tag = "2")]
    pub value: Vec<i64>,
}

/// `perftools.profiles.Mapping`
#[derive(Clone, PartialEq, Message)]
pub struct Mapping {
    /// From 1 on.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// The file.
    #[prost(int64, tag = "5")]
    pub filename: i64,
    /// Functions are named already.
    #[prost(bool, tag = "7")]
    pub has_functions: bool,
}

/// `perftools.profiles.Line`
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Line {
    /// Which function.
    #[prost(uint64, tag = "1")]
    pub function_id: u64,
}

/// `perftools.profiles.Location`
#[derive(Clone, PartialEq, Message)]
pub struct Location {
    /// From 1 on.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// In which mapping; 0 for none.
    #[prost(uint64, tag = "2")]
    pub mapping_id: u64,
    /// Address in the file's own terms.
    #[prost(uint64, tag = "3")]
    pub address: u64,
    /// In which function.
    #[prost(message, repeated, tag = "4")]
    pub line: Vec<Line>,
}

/// `perftools.profiles.Function`
#[derive(Clone, PartialEq, Message)]
pub struct Function {
    /// From 1 on.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// Its name.
    #[prost(int64, tag = "2")]
    pub name: i64,
    /// Its name as the linker knows it; the same here.
    #[prost(int64, tag = "3")]
    pub system_name: i64,
    /// The file with its code.
    #[prost(int64, tag = "4")]
    pub filename: i64,
}

/// `perftools.profiles.Profile`
#[derive(Clone, PartialEq, Message)]
pub struct Profile {
    /// What the values are.
    #[prost(message, repeated, tag = "1")]
    pub sample_type: Vec<ValueType>,
    /// The call sites.
    #[prost(message, repeated, tag = "2")]
    pub sample: Vec<Sample>,
    /// The files.
    #[prost(message, repeated, tag = "3")]
    pub mapping: Vec<Mapping>,
    /// The places.
    #[prost(message, repeated, tag = "4")]
    pub location: Vec<Location>,
    /// The functions.
    #[prost(message, repeated, tag = "5")]
    pub function: Vec<Function>,
    /// All texts; the first is empty.
    #[prost(string, repeated, tag = "6")]
    pub string_table: Vec<String>,
    /// How long the look lasted.
    #[prost(int64, tag = "10")]
    pub duration_nanos: i64,
    /// Remarks.
    #[prost(int64, repeated, tag = "13")]
    pub comment: Vec<i64>,
    /// Which value is shown first.
    #[prost(int64, tag = "14")]
    pub default_sample_type: i64,
}

/// The texts so far.
#[derive(Default)]
struct Texts {
    list: Vec<String>,
    known: HashMap<String, i64>,
}

impl Texts {
    fn of(&mut self, text: &str) -> i64 {
        if let Some(at) = self.known.get(text) {
            return *at;
        }
        let at = i64::try_from(self.list.len()).unwrap_or(0);
        self.list.push(text.to_owned());
        self.known.insert(text.to_owned(), at);
        at
    }
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// The report as a profile of what is live and of all that was obtained.
pub fn profile(report: &LeakReport) -> Profile {
    let mut texts = Texts::default();
    texts.of("");
    let mut profile = Profile {
        duration_nanos: signed(report.elapsed_usec.saturating_mul(1000)),
        ..Profile::default()
    };
    for (kind, unit) in [
        ("inuse_objects", "count"),
        ("inuse_space", "bytes"),
        ("alloc_objects", "count"),
        ("alloc_space", "bytes"),
    ] {
        profile.sample_type.push(ValueType {
            kind: texts.of(kind),
            unit: texts.of(unit),
        });
    }
    profile.default_sample_type = texts.of("inuse_space");
    let (mut locations, mut functions, mut mappings) =
        (HashMap::new(), HashMap::new(), HashMap::new());
    for site in &report.sites {
        // The driver's call is the innermost frame.
        let call = (site.call.clone(), String::new(), 0);
        let frames = site
            .frames
            .iter()
            .map(|frame| (frame.to_string(), frame.file.clone(), frame.address));
        let mut location_id = Vec::new();
        for (name, file, address) in std::iter::once(call).chain(frames) {
            let mapping_id = if file.is_empty() {
                0
            } else {
                let next = mappings.len() as u64 + 1;
                *mappings.entry(file.clone()).or_insert_with(|| {
                    profile.mapping.push(Mapping {
                        id: next,
                        filename: texts.of(&file),
                        has_functions: true,
                    });
                    next
                })
            };
            let next = functions.len() as u64 + 1;
            let function_id = *functions
                .entry((name.clone(), file.clone()))
                .or_insert_with(|| {
                    let name = texts.of(&name);
                    profile.function.push(Function {
                        id: next,
                        name,
                        system_name: name,
                        filename: texts.of(&file),
                    });
                    next
                });
            let next = locations.len() as u64 + 1;
            let location = *locations.entry((function_id, address)).or_insert_with(|| {
                profile.location.push(Location {
                    id: next,
                    mapping_id,
                    address,
                    line: vec![Line { function_id }],
                });
                next
            });
            location_id.push(location);
        }
        profile.sample.push(Sample {
            location_id,
            value: [
                site.live,
                site.live_bytes,
                site.allocations,
                site.allocated_bytes,
            ]
            .map(signed)
            .to_vec(),
        });
    }
    if report.gaps.lost > 0 {
        profile.comment.push(texts.of(&format!(
            "{} calls were lost: what is told to be in use may have been given back",
            report.gaps.lost
        )));
    }
    profile.string_table = texts.list;
    profile
}

/// The report as the bytes of a file.
pub fn encode(report: &LeakReport) -> Vec<u8> {
    profile(report).encode_to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        control::leaks::{LeakFrame, LeakGaps, LeakSite, Target},
        insight::folded::folded,
    };

    fn report() -> LeakReport {
        let frame = |name: Option<&str>, address| LeakFrame {
            function: name.map(str::to_owned),
            file: "/opt/a.so".into(),
            address,
        };
        let site = |call: &str, frames, live_bytes| LeakSite {
            call: call.into(),
            frames,
            cut: false,
            live: live_bytes / 10,
            live_bytes,
            peak_bytes: live_bytes,
            allocations: 9,
            allocated_bytes: 900,
            oldest_usec: None,
            median_usec: None,
            growth: None,
            survival: Vec::new(),
        };
        LeakReport {
            target: Target::Process(7),
            running: false,
            elapsed_usec: 5,
            limit_usec: 9,
            processes: Vec::new(),
            sites: vec![
                site(
                    "cuMemAlloc_v2",
                    vec![frame(Some("keep;it"), 1), frame(Some("main"), 2)],
                    30,
                ),
                site(
                    "cuMemCreate",
                    vec![frame(None, 0x40), frame(Some("main"), 2)],
                    20,
                ),
                site("cuMemCreate", vec![frame(Some("main"), 2)], 0),
            ],
            gaps: LeakGaps::default(),
        }
    }

    #[test]
    fn a_profile_reads_back_with_all_references_in_place() {
        let profile = Profile::decode(&*encode(&report())).expect("what was written");
        assert_eq!(profile.string_table[0], "");
        assert_eq!(profile.sample.len(), 3);
        let text = |at: i64| profile.string_table[usize::try_from(at).expect("an index")].as_str();
        let stack = |sample: &Sample| -> Vec<String> {
            sample
                .location_id
                .iter()
                .map(|id| {
                    let location = profile
                        .location
                        .iter()
                        .find(|l| l.id == *id)
                        .expect("there");
                    let function = profile
                        .function
                        .iter()
                        .find(|f| f.id == location.line[0].function_id)
                        .expect("there");
                    text(function.name).to_owned()
                })
                .collect()
        };
        assert_eq!(
            stack(&profile.sample[0]),
            ["cuMemAlloc_v2", "keep;it", "main"]
        );
        assert_eq!(
            stack(&profile.sample[1]),
            ["cuMemCreate", "a.so+0x40", "main"]
        );
        assert_eq!(profile.sample[0].value, [3, 30, 9, 900]);
        assert_eq!(text(profile.default_sample_type), "inuse_space");
        // The same place is there once.
        assert_eq!(profile.location.len(), 5);
        assert_eq!(profile.mapping.len(), 1);
    }

    #[test]
    fn folded_stacks_begin_with_the_outermost() {
        assert_eq!(
            folded(&report()),
            "main;a.so+0x40;cuMemCreate 20\nmain;keep:it;cuMemAlloc_v2 30\n"
        );
    }
}
