//! Compiles the protobuf definitions with protox, so that no `protoc` is needed.

use prost::Message as _;
use std::{env, error::Error, fs, path::PathBuf};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = protox::compile(
        [
            "tidegate/peer/v1/replication.proto",
            "tidegate/admin/v1/admin.proto",
            "tidegate/deferred/v1/record.proto",
        ],
        ["proto"],
    )?;
    // The descriptors feed server reflection, so that tools like grpcurl need no file.
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptors.bin"), files.encode_to_vec())?;
    tonic_prost_build::configure()
        .bytes(".tidegate.peer.v1")
        .bytes(".tidegate.deferred.v1")
        .include_file("protos.rs")
        .compile_fds(files)?;
    Ok(())
}
