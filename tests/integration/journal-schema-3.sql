-- What eea44c1 wrote (schema 3): pod A runs on region p0, pod B was deleted by force and runs on p1, p2 is clean.
-- BOOT and KUBELET stand for the lives of node and kubelet.
BEGIN TRANSACTION;
CREATE TABLE journal (kind TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID;
CREATE TABLE history (id INTEGER PRIMARY KEY, region TEXT NOT NULL, kind TEXT NOT NULL, value TEXT NOT NULL);
CREATE INDEX history_of_region ON history (region, kind, id);
INSERT INTO journal VALUES('claims','0000-10-00.0-p0','{"device":"0000-10-00.0-p0","resource":"fpga.intel.com/region-ce48969398f05f33946d560708be108a","grants":{"0000-10-00.0-p0":{"nodes":["/dev/dfl-port.0"],"shared":[],"mounts":[],"env":{}}},"started":true,"touched":true,"exposed":false,"pod":"aaaaaaaa-aaaa-4aaa-8aaa-aaaaaaaaaaaa","epoch":"KUBELET","prestarts":1,"poststops":0,"generation":1,"since":1795465512.4523973}');
INSERT INTO journal VALUES('commits','','23');
INSERT INTO journal VALUES('epochs','boot','"BOOT"');
INSERT INTO journal VALUES('epochs','environment','"KUBELET"');
INSERT INTO journal VALUES('epochs','kubelet','"KUBELET"');
INSERT INTO journal VALUES('images','{"region":"0000-10-00.0-p0","afu_id":"18b79ffa2ee54aa096ef4230dafacb5f"}','true');
INSERT INTO journal VALUES('images','{"region":"0000-10-00.0-p1","afu_id":"18b79ffa2ee54aa096ef4230dafacb5f"}','true');
INSERT INTO journal VALUES('loans','{"pod":"bbbbbbbb-bbbb-4bbb-8bbb-bbbbbbbbbbbb","region":"0000-10-00.0-p1","node":"/dev/dfl-port.1"}','true');
INSERT INTO journal VALUES('regions','0000-10-00.0-p0','{"region":"0000-10-00.0-p0","condition":"PROGRAMMED","reason":"","afu_id":"18b79ffa2ee54aa096ef4230dafacb5f","former":[]}');
INSERT INTO journal VALUES('regions','0000-10-00.0-p1','{"region":"0000-10-00.0-p1","condition":"DIRTY","reason":"its owner left","afu_id":"18b79ffa2ee54aa096ef4230dafacb5f","former":["bbbbbbbb-bbbb-4bbb-8bbb-bbbbbbbbbbbb"]}');
INSERT INTO journal VALUES('regions','0000-10-00.0-p2','{"region":"0000-10-00.0-p2","condition":"BLANK","reason":"","afu_id":"4cc434ceb4374bd69d69b7e3fdc04577","former":[]}');
INSERT INTO journal VALUES('resources','fpga.intel.com/fpga-ce48969398f05f33946d560708be108a','true');
INSERT INTO journal VALUES('resources','fpga.intel.com/region-ce48969398f05f33946d560708be108a','true');
INSERT INTO journal VALUES('strays','0000-10-00.0-p1','1');
PRAGMA user_version = 3;
COMMIT;
