"""Kubelet's device plugin API.

link, registration, endpoint, servicer, device_stream   sockets and gRPC
service, prestart                                       what the calls do
reconcile, environment, turn, missed_prestarts          what a stock kubelet does not report
"""
