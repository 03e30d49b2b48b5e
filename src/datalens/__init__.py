"""datalens"""
